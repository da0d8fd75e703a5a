package ledger

// registerGPU notes that a process uses a GPU through UVM.
func (l *Ledger) registerGPU(p *process, e *Event) {
	if !Succeeded(e.Status) || e.UUID == (UUID{}) {
		return
	}
	if len(p.uuids) < maxGPUs {
		p.uuids[e.UUID] = true
	}
	if c := l.clients[e.Client]; c != nil && len(c.uuids) < 2 && (len(c.uuids) == 0 || c.uuids[0] != e.UUID) {
		c.uuids = append(c.uuids, e.UUID)
	}
	l.place(p)
}

// registerVASpace ties the device above an address space to a GPU.
func (l *Ledger) registerVASpace(p *process, e *Event) {
	if !Succeeded(e.Status) || e.UUID == (UUID{}) {
		return
	}
	if len(p.uuids) < maxGPUs {
		p.uuids[e.UUID] = true
	}
	if c := l.clients[e.Client]; c != nil {
		if o := c.objects[e.Handle]; o != nil {
			l.setGPU(c, o.device, e.UUID, vaspace)
		}
	}
	l.place(p)
}

// place looks again at every device of a process.
func (l *Ledger) place(p *process) {
	for _, c := range p.clients {
		l.placeDevice(c, &c.root)
		for o := c.root.child; o != nil; o = o.next { // a device's parent is its client
			if o.device == o {
				l.placeDevice(c, o)
			}
		}
	}
}

// placeDevice finds out which GPU a device object is, by the surest sign there is.
func (l *Ledger) placeDevice(c *client, device *object) {
	if device.strength >= vaspace {
		return
	}
	gpu, sure := UUID{}, unknown
	switch {
	case len(c.uuids) == 1:
		gpu, sure = c.uuids[0], ofClient
	case device.kind == Device && l.byInstance(device.instance) != UUID{}:
		gpu, sure = l.byInstance(device.instance), instance
	case len(c.owner.uuids) == 1:
		for gpu = range c.owner.uuids {
			sure = onlyGPU
		}
	case len(c.owner.uuids) == 0 && len(c.owner.minors) == 1:
		for n := range c.owner.minors {
			if gpu = l.byMinor[n]; gpu != (UUID{}) {
				sure = minor
			}
		}
	}
	l.setGPU(c, device, gpu, sure)
}

func (l *Ledger) byInstance(n uint32) UUID {
	id, ok := l.instances[n]
	if !ok {
		return UUID{}
	}
	return l.byID[id]
}

// setGPU says which GPU a device object is, and moves what was booked under it.
func (l *Ledger) setGPU(c *client, device *object, gpu UUID, sure strength) {
	device.strength = sure
	if device.gpu == gpu {
		return
	}
	old := device.gpu
	device.gpu = gpu
	l.move(c.owner, old, gpu, device.size)
}
