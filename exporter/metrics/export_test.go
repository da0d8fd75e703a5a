package metrics

import (
	"fmt"
	"slices"
	"strings"
)

// Families lists every family of the contract as "name type label,label…".
func Families() []string {
	var list []string
	for _, f := range slices.Concat(families, bounds) {
		list = append(list, strings.TrimSpace(fmt.Sprintf("%s %s %s", f.name, strings.ToLower(f.kind().String()), strings.Join(f.labels, ","))))
	}
	return list
}
