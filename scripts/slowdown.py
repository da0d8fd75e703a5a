#!/usr/bin/env python3
"""Do programs run slower while an exporter runs and is scraped once a second?

usage: slowdown.py ROUNDS SECONDS URL NAME=LIMIT=COMMAND... -- EXPORTER...

Each COMMAND is a program that prints "ready" once, and then for every line "SECONDS" of its input works that long and prints how much it did in a
second. All are started once and run one at a time. A round measures every program with the exporter and without, by turns in either order. For each
program: the median over the rounds of how much longer its work takes with the exporter, and between what 95 of 100 medians of rounds drawn anew lie.
LIMIT is the highest allowed median, as 1.01; "noise" wants 1 to lie in that interval or above it."""
import random, statistics, subprocess, sys, threading, time, urllib.request

def interval(ratios, draws=4000):
    """The 95 % bootstrap interval of the median, of a generator with a fixed seed: the same figures give the same answer."""
    r = random.Random(1)
    medians = sorted(statistics.median(r.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(draws * 0.025)], medians[int(draws * 0.975)]

def verdict(ratios, limit):
    """The median, its interval, and whether it is within the limit."""
    m, (low, high) = statistics.median(ratios), interval(ratios)
    return m, low, high, low <= 1 if limit == "noise" else m < float(limit)

class Program:
    def __init__(self, spec):
        self.name, self.limit, command = spec.split("=", 2)
        self.process = subprocess.Popen(command, shell=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.process.stdout.readline().strip() != "ready": sys.exit(f"slowdown: {self.name} does not start")
        self.off, self.on = [], []
    def measure(self, seconds):
        print(seconds, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line: sys.exit(f"slowdown: {self.name} ended")
        return float(line)

class Exporter:
    """One that runs and is scraped once a second, between with and its end."""
    def __init__(self, command, url): self.command, self.url, self.scrapes = command, url, 0
    def scrape(self): return urllib.request.urlopen(self.url + "/metrics", timeout=10).read().decode()
    def __enter__(self):
        self.process, self.stop = subprocess.Popen(self.command), threading.Event()
        until = time.time() + 30
        while True: # the tracer attaches, and the probes to the libraries that are there, soon after it serves
            try:
                if "\ngpu_exporter_tracer_up" in self.scrape(): break
            except OSError: pass
            if time.time() > until or self.process.poll() is not None: sys.exit("slowdown: the exporter does not serve")
            time.sleep(0.1)
        time.sleep(2)
        def often():
            while not self.stop.wait(1):
                self.scrape(); self.scrapes += 1
        self.thread = threading.Thread(target=often); self.thread.start()
    def __exit__(self, *_):
        self.stop.set(); self.thread.join(); self.process.terminate(); self.process.wait(60)

def main(args):
    at = args.index("--")
    rounds, seconds, url = int(args[0]), float(args[1]), args[2]
    programs, exporter = [Program(a) for a in args[3:at]], Exporter(args[at + 1:], url)
    for p in programs: p.measure(seconds) # caches and clocks
    for r in range(rounds):
        for on in (False, True) if r % 2 else (True, False):
            if on:
                with exporter:
                    for p in programs: p.on.append(p.measure(seconds))
                    if r == 0: state = [l for l in exporter.scrape().splitlines() if l.startswith(("gpu_exporter_tracer_up", "gpu_exporter_probe_up"))]
            else:
                for p in programs: p.off.append(p.measure(seconds))
    print("\n".join(state))
    print(f"{rounds} rounds of {seconds:g} s each way, {exporter.scrapes} scrapes\n")
    print("| program | a second without | with | times as long, median (95 % of it) | lowest to highest | wanted | |\n|---|---|---|---|---|---|---|")
    good = True
    for p in programs:
        ratios = [a / b for a, b in zip(p.off, p.on)]
        m, low, high, ok = verdict(ratios, p.limit)
        good = good and ok
        want = "1 within" if p.limit == "noise" else f"below {p.limit}"
        print(f"| {p.name} | {statistics.median(p.off):.1f} | {statistics.median(p.on):.1f} | {m:.4f} ({low:.4f} to {high:.4f}) | {min(ratios):.4f} to {max(ratios):.4f} | {want} | {'PASS' if ok else 'FAIL'} |")
        p.process.stdin.close(); p.process.wait()
    return not good

if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
