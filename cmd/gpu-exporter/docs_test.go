package main

import (
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"gpu-exporter/exporter/metrics"
	"gpu-exporter/exporter/why"
)

var (
	fence    = regexp.MustCompile("(?ms)^( {0,3}```).*?^ {0,3}```$")
	span     = regexp.MustCompile("`[^`\n]+`")
	link     = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading  = regexp.MustCompile(`(?m)^#+ +(.+)$`)
	notSlug  = regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
	repoPath = regexp.MustCompile("(?:^|[ `(])((?:docs|scripts|exporter|cmd|nvml|tracer|bpf)/[\\w./-]*\\w)")
	longFlag = regexp.MustCompile("`--(?:no-)?([a-z][a-z0-9.-]*)")
	testName = regexp.MustCompile(`\b(?:Test|Fuzz|Benchmark)[A-Z]\w*`)
	metric   = regexp.MustCompile(`(?:^|[^:\w])(gpu_[a-z0-9_]+)\b`) // a recorded one has a colon before
)

// anchors returns what GitHub makes of the headings of a page.
func anchors(page string) []string {
	var list []string
	for _, h := range heading.FindAllStringSubmatch(fence.ReplaceAllString(page, ""), -1) {
		list = append(list, strings.ReplaceAll(notSlug.ReplaceAllString(strings.ToLower(h[1]), ""), " ", "-"))
	}
	return list
}

// deadLinks lists the links of a page to files and headings that are not there. read returns the file of a path in the repository.
func deadLinks(name, page string, read func(path string) (string, error)) (dead []string) {
	for _, l := range link.FindAllStringSubmatch(span.ReplaceAllString(fence.ReplaceAllString(page, ""), ""), -1) {
		if strings.Contains(l[1], "://") {
			continue // of the world outside tests know nothing
		}
		target, anchor, _ := strings.Cut(l[1], "#")
		other, file := page, name
		if target != "" {
			file = path.Join(path.Dir(name), target)
			var err error
			if other, err = read(file); err != nil {
				dead = append(dead, l[1])
				continue
			}
		}
		if anchor != "" && (!strings.HasSuffix(file, ".md") || !slices.Contains(anchors(other), anchor)) {
			dead = append(dead, l[1])
		}
	}
	return dead
}

// TestDeadLinks: a link to a file or heading that is not there is found, one in code is none.
func TestDeadLinks(t *testing.T) {
	read := func(path string) (string, error) {
		if path != "docs/b.md" {
			return "", os.ErrNotExist
		}
		return "# The kernel's side: `ps`\n```\n# no heading\n```\n", nil
	}
	page := "# One\n[a](#one) [b](b.md#the-kernels-side-ps) [c](b.md) ![d](https://x.invalid/y) `[e](gone)`\n" +
		"[1](#two) [2](../b.md) [3](b.md#no-heading)\n```\n[f](gone)\n```\n![4](c.png)\n"
	if dead := deadLinks("docs/a.md", page, read); !slices.Equal(dead, []string{"#two", "../b.md", "b.md#no-heading", "c.png"}) {
		t.Errorf("dead links: %q", dead)
	}
}

// TestDocs: what the documents name is there: files, headings, flags, metrics and tests.
func TestDocs(t *testing.T) {
	// Flags of other programs that the documents speak of.
	flags := []string{"pid", "privileged", "gpus", "device"}
	m := commandLine(t)
	for _, f := range m.Flags {
		flags = append(flags, f.Name)
	}
	for _, c := range m.FlattenedCommands() {
		for _, f := range c.Flags {
			flags = append(flags, f.Name)
		}
	}
	var names []string
	for _, f := range metrics.Families() {
		names = append(append(names, f.Name), f.Labels...)
		if f.Type == "histogram" || f.Type == "summary" {
			names = append(names, f.Name+"_bucket", f.Name+"_sum", f.Name+"_count")
		}
	}
	names = append(names, "gpu_exporter_build_info")
	for _, c := range why.Causes {
		names = append(names, c.Name) // gpu_lost reads like one
	}
	list := files(t)
	read := func(path string) (string, error) {
		if !slices.ContainsFunc(list, func(f string) bool { return f == path || strings.HasPrefix(f, path+"/") }) {
			return "", os.ErrNotExist // or one that git ignores: others do not have it
		}
		if s, err := os.Stat(root + path); err != nil || s.IsDir() {
			return "", err
		}
		b, err := os.ReadFile(root + path)
		return string(b), err
	}
	var code strings.Builder // of all tests
	for _, f := range list {
		if strings.HasSuffix(f, "_test.go") {
			text, _ := read(f) // deleted, not yet committed
			code.WriteString(text)
		}
	}
	pages := 0
	for _, name := range list {
		if !strings.HasSuffix(name, ".md") {
			continue
		}
		pages++
		page, err := read(name)
		if err != nil {
			continue // deleted, not yet committed
		}
		for _, l := range deadLinks(name, page, read) {
			t.Errorf("%s: a dead link: %s", name, l)
		}
		for _, p := range repoPath.FindAllStringSubmatch(page, -1) {
			if _, err := read(p[1]); err != nil {
				t.Errorf("%s: there is no %s", name, p[1])
			}
		}
		for _, f := range testName.FindAllString(page, -1) {
			if !strings.Contains(code.String(), "\nfunc "+f+"(") {
				t.Errorf("%s: there is no test %s", name, f)
			}
		}
		for _, f := range longFlag.FindAllStringSubmatch(page, -1) {
			part := func(n string) bool { return n == f[1] || strings.HasSuffix(f[1], ".") && strings.HasPrefix(n, f[1]) }
			if !slices.ContainsFunc(flags, part) {
				t.Errorf("%s: there is no flag --%s", name, f[1])
			}
		}
		for _, s := range metric.FindAllStringSubmatch(page, -1) {
			part := func(n string) bool { return n == s[1] || strings.HasSuffix(s[1], "_") && strings.HasPrefix(n, s[1]) }
			if !slices.ContainsFunc(names, part) {
				t.Errorf("%s: there is no metric %s", name, s[1])
			}
		}
	}
	if pages < 5 {
		t.Errorf("%d pages", pages)
	}
}
