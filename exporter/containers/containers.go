// Package containers says what a container is to this exporter: its identity, which GPUs it asked for, and how a process's
// control group leads to it. Everything here is a pure function of text; package docker fetches the text.
package containers

import (
	"slices"
	"strings"
	"time"
)

// Container is one running container.
type Container struct {
	ID        string    `json:"id"`        // full id, 64 hex digits
	Name      string    `json:"name"`      // without the leading slash
	Image     string    `json:"image"`     // as given by the user, such as "vllm/vllm-openai:v0.9"
	ImageID   string    `json:"image_id"`  // "sha256:…"
	Runtime   string    `json:"runtime"`   // OCI runtime, such as "runc" or "nvidia"
	Project   string    `json:"project"`   // compose project
	Service   string    `json:"service"`   // compose service
	Pod       string    `json:"pod"`       // Kubernetes pod name
	Namespace string    `json:"namespace"` // Kubernetes namespace
	PID       int       `json:"pid"`       // host PID of its first process
	Started   time.Time `json:"started"`   //
	Requests  []Request `json:"requests"`  // what it asked for, in the order of preference; nil: no GPU asked for
	// Nodes are the minors of the /dev/nvidiaN nodes that really exist inside, sorted. nil: not known.
	Nodes []int `json:"nodes"`
}

// Source says in which way a container was given GPUs.
type Source string

// The ways to give GPUs to a container.
const (
	SourceDeviceRequests Source = "device_requests" // docker run --gpus
	SourceCDI            Source = "cdi"             // docker run --device nvidia.com/gpu=0
	SourceEnv            Source = "env"             // NVIDIA_VISIBLE_DEVICES with the nvidia runtime
	SourceDeviceNode     Source = "device_node"     // docker run --device /dev/nvidia0, or --privileged
)

// Request is one way in which the container asked for GPUs.
type Request struct {
	Source Source   `json:"source"`
	Text   string   `json:"text"`  // as gpu_request shows it: "all", "count=2", "device=0,1", "cdi:nvidia.com/gpu=0", "env:all", "node:/dev/nvidia0", "privileged"
	All    bool     `json:"all"`   // every GPU
	Count  int      `json:"count"` // the first Count GPUs
	IDs    []string `json:"ids"`   // index, UUID, UUID prefix, MIG UUID, "G:I" MIG index, PCI bus id, or device node path
}

// ShortLen is the length of the short form of a container id, as in "docker ps".
const ShortLen = 12

// ShortID returns the first 12 characters of a container id: the label container_id.
func ShortID(id string) string {
	if len(id) > ShortLen {
		return id[:ShortLen]
	}
	return id
}

// ShortID returns the short form of the container's id.
func (c Container) ShortID() string { return ShortID(c.ID) }

// Equal tells whether two containers are the same in every field.
func (c Container) Equal(d Container) bool {
	return c.ID == d.ID && c.Name == d.Name && c.Image == d.Image && c.ImageID == d.ImageID && c.Runtime == d.Runtime &&
		c.Project == d.Project && c.Service == d.Service && c.Pod == d.Pod && c.Namespace == d.Namespace && c.PID == d.PID &&
		c.Started.Equal(d.Started) && equalRequests(c.Requests, d.Requests) && (c.Nodes == nil) == (d.Nodes == nil) &&
		slices.Equal(c.Nodes, d.Nodes)
}

func equalRequests(a, b []Request) bool {
	return slices.EqualFunc(a, b, func(x, y Request) bool {
		return x.Source == y.Source && x.Text == y.Text && x.All == y.All && x.Count == y.Count && slices.Equal(x.IDs, y.IDs)
	})
}

// RequestText joins the texts of all requests: the label gpu_request. Empty: the container asked for no GPU.
func (c Container) RequestText() string {
	switch len(c.Requests) {
	case 0:
		return ""
	case 1:
		return c.Requests[0].Text
	}
	texts := make([]string, len(c.Requests))
	for i, r := range c.Requests {
		texts[i] = r.Text
	}
	return strings.Join(texts, ";")
}
