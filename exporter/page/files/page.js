'use strict';
// What comes from the host is put in as text, never as HTML.

const most = 200; // containers and processes that are drawn
let snapshot = null, history = {devices: [], containers: []}, why = {};

function el(tag, props, ...children) {
  const e = document.createElement(tag);
  Object.assign(e, props);
  e.append(...children.filter(c => c !== null));
  return e;
}

function size(n) {
  if (n === undefined) return '-';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let i = 0;
  for (; n >= 1024 && i < units.length - 1; i++) n /= 1024;
  return n.toFixed(i === 0 || n >= 100 ? 0 : n >= 10 ? 1 : 2) + ' ' + units[i];
}
const figure = (n, unit) => n === undefined ? '-' : n.toFixed(0) + unit;

// spark draws values of 0 to top; a gap is where nothing was read.
function spark(values, top) {
  const ns = 'http://www.w3.org/2000/svg', w = Math.max((values || []).length - 1, 1);
  let line = '', area = '', start = null;
  const close = x => { if (start !== null) area += `L${x} 1V1L${start} 1Z`; start = null; };
  (values || []).forEach((v, i) => {
    if (v === null) return close(i - 1);
    const y = (1 - Math.min(v / top, 1)).toFixed(3), first = start === null;
    if (first) start = i;
    line += (first ? 'M' : 'L') + i + ' ' + y;
    area += first ? `M${i} 1L${i} ${y}` : `L${i} ${y}`;
  });
  close(w);
  const svg = document.createElementNS(ns, 'svg');
  svg.setAttribute('viewBox', `0 0 ${w} 1`);
  svg.setAttribute('preserveAspectRatio', 'none');
  svg.setAttribute('aria-hidden', 'true');
  for (const [name, d] of [['area', area], ['line', line]]) {
    const path = document.createElementNS(ns, 'path');
    path.setAttribute('class', name);
    path.setAttribute('d', d);
    svg.append(path);
  }
  return svg;
}

const item = (name, value, values, top) => el('div', {}, el('dt', {textContent: name}), el('dd', {textContent: value}), spark(values, top));

function gpu(d) {
  const h = history.devices.find(x => x.uuid === d.uuid) || {}, used = d.memory_used_bytes, total = d.memory_total_bytes;
  const idle = ['gpu_idle', 'applications_clocks', 'display_clocks'];
  const limits = (d.throttle_reasons || []).filter(r => !idle.includes(r)).join(', ');
  return el('article', {},
    el('h2', {textContent: `GPU ${d.index} ${d.name || ''}`}),
    el('small', {textContent: `${d.uuid} ${d.pci_bus_id || ''}`}),
    d.state === 'ok' ? null : el('p', {className: 'bad', textContent: `${d.state}: ${d.reason || ''}`}),
    limits ? el('p', {className: 'bad', textContent: 'Clocks limited by ' + limits}) : null,
    el('dl', {},
      item('Utilisation', figure(d.utilization_percent, ' %'), h.utilization_percent, 100),
      item('Memory', size(used) + ' of ' + size(total), h.memory_used_bytes, total || 1),
      item('Power', figure(d.power_watts, ' W') + (d.power_limit_watts ? ' of ' + figure(d.power_limit_watts, ' W') : ''), h.power_watts, d.power_limit_watts || 1000),
      item('Temperature', figure(d.temperature_celsius, ' °C'), h.temperature_celsius, 110)));
}

function processes(list) {
  const cell = (tag, text, left) => el(tag, {textContent: text, className: left ? 'text' : ''});
  const rows = list.slice(0, most).map(w => el('tr', {}, cell('td', w.pid ? w.command || w.process_name || '-' : 'no process accounts for it', true),
    cell('td', w.pid || '-'), cell('td', w.gpu), cell('td', figure(w.utilization_percent, ' %')), cell('td', size(w.memory_used_bytes) + (w.memory_peak_bytes > w.memory_used_bytes ? ', peak ' + size(w.memory_peak_bytes) : ''))));
  return el('table', {}, el('tr', {}, cell('th', 'Process', true), cell('th', 'PID'), cell('th', 'GPU'), cell('th', 'Util'), cell('th', 'Memory')), ...rows);
}

// reason says what holds a container back, most of all.
function reason(f) {
  return f ? el('p', {className: 'why', title: f.cause, textContent: f.text + ((f.evidence || []).length ? ` (${f.evidence.join('; ')})` : '')}, el('span', {textContent: f.advice})) : null;
}

function container(c, list) {
  const h = history.containers.find(x => x.id === c.id), totals = snapshot.devices.map(d => d.memory_total_bytes || 0), gpus = Math.max(new Set(list.map(w => w.gpu_uuid)).size, 1);
  return el('article', {},
    el('h2', {textContent: c.name || c.id.slice(0, 12)}),
    el('small', {textContent: [c.image, c.id.slice(0, 12), c.gpu_request && 'asked for ' + c.gpu_request].filter(Boolean).join(' · ')}),
    reason(why[c.id]),
    h ? el('dl', {},
      item('Utilisation', figure(c.utilization_percent, ' %'), h.utilization_percent, 100 * gpus),
      item('Memory', size(c.memory_used_bytes), h.memory_used_bytes, Math.max(...totals, 1) * gpus)) : null,
    list.length ? processes(list) : el('p', {textContent: 'No process on a GPU.'}));
}

function draw() {
  if (!snapshot || !getSelection().isCollapsed) return; // somebody selects text to copy
  const s = snapshot, by = new Map();
  document.getElementById('host').textContent = [s.host.name, s.host.ip, s.driver.version && 'driver ' + s.driver.version, new Date(s.time).toLocaleTimeString()].filter(Boolean).join(' · ');
  for (const w of s.workloads) {
    const id = w.container_id || '';
    by.set(id, [...by.get(id) || [], w]);
  }
  const known = new Set(s.containers.map(c => c.id));
  const others = [...by.keys()].filter(id => id && !known.has(id)).map(id => ({id: id, name: by.get(id)[0].container_name}));
  const all = [...s.containers, ...others].sort((a, b) => (b.utilization_percent || 0) - (a.utilization_percent || 0));
  document.getElementById('gpus').replaceChildren(...s.devices.map(gpu));
  const cards = all.slice(0, most).map(c => container(c, by.get(c.id) || []));
  if (by.has('')) cards.push(el('article', {}, el('h2', {textContent: 'Outside containers'}), processes(by.get(''))));
  if (all.length > most) cards.push(el('p', {textContent: `and ${all.length - most} more containers`}));
  document.getElementById('containers').replaceChildren(...cards);
  const down = s.sources.filter(x => !x.up).map(x => `${x.name} is down: ${short(x.reason || '')}`);
  if (down.length) down.push('What to do: gpu-exporter doctor');
  if (s.recorded) down.unshift('A recording, not this host.');
  notice(down.join('\n'));
}

// short cuts a reason that is too long for a page; the JSON has all of it.
const short = text => text.length > 300 ? text.slice(0, 300) + '…' : text;

function notice(text) { Object.assign(document.getElementById('notice'), {textContent: text, className: 'bad'}); }

function connect() {
  const source = new EventSource('api/v1/stream');
  source.addEventListener('history', e => { history = JSON.parse(e.data); });
  source.addEventListener('why', e => { why = JSON.parse(e.data); });
  source.addEventListener('snapshot', e => { snapshot = JSON.parse(e.data); draw(); });
  source.onerror = () => {
    notice('The exporter does not answer; trying again. What is shown is old.');
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 5000); // refused: the browser does not try again by itself
  };
}

connect();
