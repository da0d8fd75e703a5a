package containers

import "strings"

// idLen is the length of a full container id in hexadecimal digits.
const idLen = 64

// FromCgroup returns the full id of the innermost container that a control group belongs to, or "" where there is none. The text
// is the content of /proc/<pid>/cgroup (v1, v2 or hybrid), or one path, or just a path's last component.
//
// A container id is the last path component that ends in 64 hexadecimal digits, bare or behind a prefix such as "docker-",
// "cri-containerd-", "crio-" or "libpod-", with or without ".scope". Supervisors of a container (conmon) are no part of it.
func FromCgroup(text string) string {
	if ids := IDs(text); len(ids) > 0 {
		return ids[len(ids)-1]
	}
	return ""
}

// IDs returns the ids of every container that a control group is nested in, outermost first: more than one with Docker in
// Docker, or Kubernetes in Docker. The engine of the host knows the outermost, an engine inside knows the next, and so on.
func IDs(text string) []string {
	var ids []string
	for line := range strings.Lines(text) {
		// The controllers of a v1 or hybrid host may place a process differently; the deepest place says most.
		if found := pathIDs(cgroupPath(strings.TrimRight(line, "\n"))); len(found) > len(ids) {
			ids = found
		}
	}
	return ids
}

// Owner returns the id of the container that a control group is to be counted for: the innermost one that known accepts, else
// the innermost. So what runs inside a Docker-in-Docker container is counted for the container that the host's engine can name.
func Owner(text string, known func(id string) bool) string {
	ids := IDs(text)
	for i := len(ids) - 1; i >= 0; i-- {
		if known(ids[i]) {
			return ids[i]
		}
	}
	if len(ids) > 0 {
		return ids[len(ids)-1]
	}
	return ""
}

// CgroupPath returns the path that says most in the content of /proc/<pid>/cgroup: the one with the most container ids, else that
// of the unified hierarchy, else that of the first line.
func CgroupPath(text string) string {
	best, bestIDs, unified := "", -1, false
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if line == "" {
			continue
		}
		path, ids := cgroupPath(line), 0
		if found := pathIDs(path); found != nil {
			ids = len(found)
		}
		v2 := strings.HasPrefix(line, "0::")
		if ids > bestIDs || ids == bestIDs && v2 && !unified {
			best, bestIDs, unified = path, ids, v2
		}
	}
	return best
}

// cgroupPath strips "hierarchy:controllers:" from a line of /proc/<pid>/cgroup. The path itself may hold colons.
func cgroupPath(line string) string {
	number, rest, ok := strings.Cut(line, ":")
	if ok && number != "" && strings.Trim(number, "0123456789") == "" {
		if _, path, ok := strings.Cut(rest, ":"); ok {
			line = path
		}
	}
	return strings.TrimSuffix(line, " (deleted)")
}

func pathIDs(path string) []string {
	var ids []string
	for len(path) > 0 {
		component := path
		// containerd with the systemd driver on a host without systemd makes "slice:cri-containerd:<id>" one component.
		if i := strings.IndexAny(path, "/:"); i >= 0 {
			component, path = path[:i], path[i+1:]
		} else {
			path = ""
		}
		switch id, supervisor := componentID(component); {
		case supervisor && id == "" && len(ids) > 0:
			ids = ids[:len(ids)-1] // ".../<id>/conmon"
		case id != "" && !supervisor && (len(ids) == 0 || ids[len(ids)-1] != id):
			ids = append(ids, id)
		}
	}
	return ids
}

// componentID returns the container id of one path component, and whether the component is that of a supervisor.
func componentID(s string) (id string, supervisor bool) {
	if s == "conmon" {
		return "", true
	}
	s = strings.TrimSuffix(s, ".scope")
	s = strings.TrimSuffix(s, ".slice")
	s = strings.TrimSuffix(s, ".service")
	if len(s) < idLen {
		return "", false
	}
	prefix, id := s[:len(s)-idLen], s[len(s)-idLen:]
	for i := range len(id) {
		if c := id[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return "", false
		}
	}
	// A longer run of digits is no container id.
	if prefix != "" && !strings.HasSuffix(prefix, "-") && !strings.HasSuffix(prefix, "_") && !strings.HasSuffix(prefix, ".") {
		return "", false
	}
	return id, strings.Contains(prefix, "conmon")
}
