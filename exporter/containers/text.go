package containers

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Clean makes text from outside fit for a label, a log line and a terminal: valid UTF-8, at most limit characters, and every
// character that is not graphic (control characters, escape sequences, direction marks, line separators, broken bytes) replaced
// by U+FFFD. Text that is already fit is returned as it is, without an allocation.
func Clean(s string, limit int) string {
	fit, n := true, 0
	for i, r := range s {
		if n == limit {
			s = s[:i]
			break
		}
		n++
		if !graphic(r) {
			fit = false
		}
	}
	if fit {
		return s
	}
	var b strings.Builder
	b.Grow(len(s) + 8)
	for _, r := range s { // a broken byte comes as utf8.RuneError
		if !graphic(r) {
			r = utf8.RuneError
		}
		b.WriteRune(r)
	}
	return b.String()
}

// Cut is Clean for people: text that is too long ends in an ellipsis.
func Cut(s string, limit int) string {
	fit := Clean(s, limit)
	if utf8.RuneCountInString(fit) < utf8.RuneCountInString(s) {
		fit += "…"
	}
	return fit
}

func graphic(r rune) bool { return r != utf8.RuneError && unicode.IsGraphic(r) }
