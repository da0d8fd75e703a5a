package assets_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"gpu-exporter/exporter/assets"
)

func installFile(t *testing.T, name string) string {
	t.Helper()
	b, err := assets.Files.ReadFile("install/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestUnit: systemd takes the unit, and finds it far from unconfined.
func TestUnit(t *testing.T) {
	text := strings.Replace(installFile(t, "gpu-exporter.service"), "/usr/local/bin/gpu-exporter", "/bin/true", 1) // the program must be there
	unit := filepath.Join(t.TempDir(), "gpu-exporter.service")
	if err := os.WriteFile(unit, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("systemd-analyze", "verify", unit).CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
	// Of a unit without any hardening it says 9.6 of 10.
	if out, err := exec.Command("systemd-analyze", "security", "--offline=yes", "--threshold=75", unit).CombinedOutput(); err != nil {
		t.Errorf("systemd-analyze security: %v\n%s", err, out)
	}
}

// TestScrapeConfig: Prometheus takes it and finds the rules beside it: it says nothing when there are none. Debian's knows no Kubernetes, so that
// job is only parsed.
func TestScrapeConfig(t *testing.T) {
	if out, err := exec.Command("promtool", "check", "config", "install/prometheus.yaml").CombinedOutput(); err != nil || !strings.Contains(string(out), "2 rule files found") {
		t.Errorf("promtool: %v\n%s", err, out)
	}
	var c struct {
		Jobs []struct {
			Name    string `json:"job_name"`
			Relabel []struct {
				To string `json:"target_label"`
			} `json:"relabel_configs"`
		} `json:"scrape_configs"`
	}
	if err := yaml.Unmarshal([]byte(installFile(t, "prometheus-kubernetes.yaml")), &c); err != nil || len(c.Jobs) != 1 {
		t.Fatalf("%d jobs: %v", len(c.Jobs), err)
	}
	for _, r := range c.Jobs[0].Relabel {
		if r.To == "pod" || r.To == "namespace" {
			t.Errorf("the label %s of the workloads would be renamed", r.To)
		}
	}
}

// TestKubernetes: the manifests parse and name each other: pods by labels, ports by names, volumes by names.
func TestKubernetes(t *testing.T) {
	type object struct {
		Kind     string
		Metadata struct {
			Name, Namespace string
			Labels          map[string]string
		}
		Spec struct {
			Selector  map[string]any
			Ports     []struct{ Name, TargetPort string }
			Endpoints []struct {
				Port        string
				HonorLabels bool
			}
			Template struct {
				Metadata struct{ Labels map[string]string }
				Spec     struct {
					HostPID    bool
					Containers []struct {
						Args         []string
						Env          []struct{ Name string }
						Ports        []struct{ Name string }
						VolumeMounts []struct{ Name, MountPath string }
					}
					Volumes []struct{ Name string }
				}
			}
		}
	}
	objects := map[string]object{}
	for _, doc := range strings.Split(installFile(t, "kubernetes.yaml")+"\n---\n"+installFile(t, "servicemonitor.yaml"), "\n---\n") {
		var o object
		if err := yaml.Unmarshal([]byte(doc), &o); err != nil {
			t.Fatalf("%v\n%s", err, doc)
		}
		objects[o.Kind] = o
	}
	set, service, monitor := objects["DaemonSet"], objects["Service"], objects["ServiceMonitor"]
	pod := set.Spec.Template.Spec
	if len(objects) != 4 || len(pod.Containers) != 1 || len(service.Spec.Ports) != 1 || len(monitor.Spec.Endpoints) != 1 {
		t.Fatalf("objects: %+v", objects)
	}
	labels := map[string]any{}
	for k, v := range set.Spec.Template.Metadata.Labels {
		labels[k] = v
	}
	for what, got := range map[string]any{"DaemonSet": set.Spec.Selector["matchLabels"], "Service": service.Spec.Selector, "ServiceMonitor": monitor.Spec.Selector["matchLabels"]} {
		if !reflect.DeepEqual(got, labels) {
			t.Errorf("%s selects %v, the pods have %v", what, got, labels)
		}
	}
	for _, o := range []object{set, service, monitor} {
		if o.Metadata.Namespace != objects["Namespace"].Metadata.Name {
			t.Errorf("%s is in namespace %q", o.Kind, o.Metadata.Namespace)
		}
	}
	c := pod.Containers[0]
	if service.Spec.Ports[0].TargetPort != c.Ports[0].Name || monitor.Spec.Endpoints[0].Port != service.Spec.Ports[0].Name || !monitor.Spec.Endpoints[0].HonorLabels {
		t.Errorf("ports %+v, %+v, %+v", c.Ports, service.Spec.Ports, monitor.Spec.Endpoints)
	}
	if !pod.HostPID || !strings.Contains(strings.Join(c.Args, " "), "$("+c.Env[0].Name+")") {
		t.Errorf("PIDs of the host %v, arguments %q", pod.HostPID, c.Args)
	}
	volumes := map[string]bool{}
	for _, v := range pod.Volumes {
		volumes[v.Name] = true
	}
	for _, m := range c.VolumeMounts {
		if !volumes[m.Name] {
			t.Errorf("no volume %s", m.Name)
		}
	}
	if len(c.VolumeMounts) != 2 {
		t.Errorf("mounts %v", c.VolumeMounts)
	}
}
