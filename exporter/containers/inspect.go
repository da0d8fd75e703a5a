package containers

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Longest texts, in characters, that are kept of what an engine says.
const (
	maxName = 256
	maxText = 256
	maxIDs  = 256 // devices in one request
)

// Inspect is the part of an engine's GET /containers/{id}/json that this exporter uses. Of the environment only the variables that
// choose GPUs are ever kept.
type Inspect struct {
	ID         string `json:"Id"`
	Name       string
	Image      string // id of the image
	State      InspectState
	Config     InspectConfig
	HostConfig InspectHostConfig
	Mounts     []InspectMount
}

// InspectState is the container's state. A container that is restarting has no process.
type InspectState struct {
	Running    bool
	Restarting bool
	Pid        int
	StartedAt  time.Time
}

// InspectConfig is what the image and the user said.
type InspectConfig struct {
	Image  string // as given by the user
	Env    GPUEnv
	Labels map[string]string
}

// InspectHostConfig is what the user asked of the host.
type InspectHostConfig struct {
	Runtime        string
	Privileged     bool
	Devices        []InspectDevice
	DeviceRequests []InspectDeviceRequest
}

// InspectDevice is one --device.
type InspectDevice struct {
	PathOnHost      string
	PathInContainer string
}

// InspectDeviceRequest is one --gpus, or one CDI --device.
type InspectDeviceRequest struct {
	Driver       string     // "nvidia", "cdi", "amd" or empty
	Count        int        // -1: all
	DeviceIDs    []string   //
	Capabilities [][]string // one of these sets must be fulfilled
}

// InspectMount is one mount.
type InspectMount struct {
	Destination string
}

// GPUEnv holds the variables of a container's environment that choose GPUs. All others are dropped while decoding.
type GPUEnv struct {
	VisibleDevices string // NVIDIA_VISIBLE_DEVICES
	HasVisible     bool
	HasCUDAVersion bool // CUDA_VERSION is set: a CUDA image
	HasRequireCUDA bool // NVIDIA_REQUIRE_CUDA is set: not one of the first CUDA images
}

// UnmarshalJSON reads an array of "NAME=value".
func (e *GPUEnv) UnmarshalJSON(data []byte) error {
	var list []string
	if err := json.Unmarshal(data, &list); err != nil {
		return err
	}
	*e = GPUEnv{}
	for _, entry := range list {
		name, value, _ := strings.Cut(entry, "=")
		switch name {
		case "NVIDIA_VISIBLE_DEVICES": // the last one counts, as in the nvidia runtime
			e.VisibleDevices, e.HasVisible = strings.Clone(value), true
		case "CUDA_VERSION":
			e.HasCUDAVersion = true
		case "NVIDIA_REQUIRE_CUDA":
			e.HasRequireCUDA = true
		}
	}
	return nil
}

// ErrNoID is returned for an answer without a container id.
var ErrNoID = errors.New("no container id")

// FromInspect decodes an engine's answer to GET /containers/{id}/json. running is false when the container has no process. A
// field of an unexpected type is left out; only an answer that is not JSON or names no container is an error.
func FromInspect(raw []byte) (c Container, running bool, err error) {
	var in Inspect
	if err := json.Unmarshal(raw, &in); err != nil {
		var wrongType *json.UnmarshalTypeError
		if !errors.As(err, &wrongType) {
			return Container{}, false, fmt.Errorf("decoding inspect: %w", err)
		}
	}
	if in.ID == "" {
		return Container{}, false, fmt.Errorf("decoding inspect: %w", ErrNoID)
	}
	return New(in), in.State.Running && !in.State.Restarting && in.State.Pid > 0, nil
}

// New makes a container of what the engine said about it. Nodes stays unknown.
func New(in Inspect) Container {
	c := Named(in.ID, in.Name, in.Config.Image, in.Image, in.Config.Labels)
	c.Runtime = Clean(in.HostConfig.Runtime, maxText)
	c.PID = in.State.Pid
	c.Started = in.State.StartedAt
	c.Requests = Requests(in)
	return c
}

// Named makes a container of the facts that also the engine's list gives: all that identifies it, nothing about GPUs.
func Named(id, name, image, imageID string, labels map[string]string) Container {
	label := func(names ...string) string {
		for _, n := range names {
			if v := labels[n]; v != "" {
				return Clean(v, maxName)
			}
		}
		return ""
	}
	return Container{
		ID:        Clean(id, 2*idLen),
		Name:      Clean(strings.TrimLeft(name, "/"), maxName),
		Image:     Clean(image, maxName),
		ImageID:   Clean(imageID, maxName),
		Project:   label("com.docker.compose.project", "io.podman.compose.project"),
		Service:   label("com.docker.compose.service", "io.podman.compose.service"),
		Pod:       label("io.kubernetes.pod.name"),
		Namespace: label("io.kubernetes.pod.namespace"),
	}
}
