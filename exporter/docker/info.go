package docker

import "context"

// Info is what an engine says of itself.
type Info struct {
	Version       string   // the engine's
	API           string   // the version that was agreed on
	CgroupDriver  string   // "systemd", "cgroupfs" or "none"
	CgroupVersion string   // "1" or "2"
	Runtimes      []string // OCI runtimes
	CDI           []string // directories of CDI specifications; none: the engine does not do CDI

	Reason string // why it cannot be asked; empty: it was
}

// Look asks an engine about itself, once. It takes no longer than the timeout of the configuration.
func Look(ctx context.Context, c Config) Info {
	c = c.withDefaults()
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	err := preflight(ctx, c.Host, c.Timeout)
	if err == nil {
		var a *api
		if a, err = dial(ctx, c.Host, c.Timeout); err == nil {
			defer a.close()
			var i Info
			if i, err = a.info(ctx); err == nil {
				return i
			}
		}
	}
	return Info{Reason: diagnose(c.Host, err).reason}
}
