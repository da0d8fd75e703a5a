package main

import (
	"regexp"
	"strings"
	"testing"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	"sigs.k8s.io/json"
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

// decode reads a manifest as an API server does that refuses what it does not know: by the types of the API, letters case for case.
func decode(manifest string, kinds map[string]func() any) []error {
	b, err := yaml.YAMLToJSONStrict([]byte(manifest))
	if err != nil {
		return []error{err}
	}
	var meta struct{ APIVersion, Kind string }
	if err := yaml.Unmarshal(b, &meta); err != nil {
		return []error{err}
	}
	into, ok := kinds[meta.APIVersion+" "+meta.Kind]
	if !ok {
		return []error{&unknownKind{meta.APIVersion + " " + meta.Kind}}
	}
	strict, err := json.UnmarshalStrict(b, into())
	if err != nil {
		strict = append(strict, err)
	}
	return strict
}

type unknownKind struct{ kind string }

func (u *unknownKind) Error() string { return "no such kind: " + u.kind }

// TestSchema: the manifests have the fields of Kubernetes' and the Prometheus operator's types and no others; and a field that is misspelt is found.
func TestSchema(t *testing.T) {
	kinds := map[string]func() any{
		"v1 Namespace": func() any { return &core.Namespace{} }, "v1 Service": func() any { return &core.Service{} },
		"apps/v1 DaemonSet":                       func() any { return &apps.DaemonSet{} },
		"monitoring.coreos.com/v1 ServiceMonitor": func() any { return &monitoring.ServiceMonitor{} },
	}
	n := 0
	for _, name := range []string{"kubernetes.yaml", "servicemonitor.yaml"} {
		for _, doc := range strings.Split(installFile(t, name), "\n---\n") {
			n++
			for _, err := range decode(doc, kinds) {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	if n != 4 {
		t.Errorf("%d manifests", n)
	}
	// The alternative without privileges is a comment.
	text := installFile(t, "kubernetes.yaml")
	const privileged = "          securityContext: {privileged: true, readOnlyRootFilesystem: true}\n"
	alternative := regexp.MustCompile(`(?m)^          # (securityContext:|  \w+: .*)\n`)
	if !strings.Contains(text, privileged) || len(alternative.FindAllString(text, -1)) != 5 {
		t.Fatal("kubernetes.yaml has no alternative to its security context")
	}
	text = alternative.ReplaceAllString(strings.Replace(text, privileged, "", 1), "          $1\n")
	for _, doc := range strings.Split(text, "\n---\n") {
		for _, err := range decode(doc, kinds) {
			t.Errorf("without privileges: %v", err)
		}
		var set apps.DaemonSet
		if strings.Contains(doc, "kind: DaemonSet") && (yaml.Unmarshal([]byte(doc), &set) != nil || len(set.Spec.Template.Spec.Containers[0].SecurityContext.Capabilities.Add) != 5) {
			t.Error("without privileges it has not the five capabilities")
		}
	}
	for old, wrong := range map[string]string{"hostPID: true": "hostPid: true", "containerPort: 9400": "containerPort: metrics", "kind: Service\n": "kind: Services\n",
		"readOnly: true": "readOnly: true, readonly: true"} {
		found := 0
		for _, doc := range strings.Split(strings.Replace(installFile(t, "kubernetes.yaml"), old, wrong, 1), "\n---\n") {
			found += len(decode(doc, kinds))
		}
		if found != 1 {
			t.Errorf("%s: %d complaints", wrong, found)
		}
	}
}
