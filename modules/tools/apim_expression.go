package tools

import (
	"bytes"
	"fmt"
	"strings"
)

// Policies are written as XML whose attributes and texts may be expressions in
// C#: @(…) and @{…}. As the portal and repositories have them, quotes and < in
// an expression are not escaped, and API Management itself finds its end.

var escapes = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;", "'", "&apos;")

// escapeExpressions makes XML of a policy. Lines stay where they are.
func escapeExpressions(text []byte) ([]byte, error) {
	var out bytes.Buffer
	for i := 0; i < len(text); {
		rest := text[i:]
		switch {
		case bytes.HasPrefix(rest, []byte("<!--")):
			end := bytes.Index(rest, []byte("-->"))
			if end < 0 {
				return nil, fmt.Errorf("line %d: the comment has no end", lineAt(text, int64(i)))
			}
			out.Write(rest[:end])
			i += end
		case (bytes.HasPrefix(rest, []byte("@{")) || bytes.HasPrefix(rest, []byte("@("))) && beginsValue(text[:i]):
			n := expressionEnd(string(rest))
			if n < 0 {
				return nil, fmt.Errorf("line %d: the expression has no end", lineAt(text, int64(i)))
			}
			out.WriteString(escapes.Replace(string(rest[:n])))
			i += n
		default:
			out.WriteByte(text[i])
			i++
		}
	}
	return out.Bytes(), nil
}

// beginsValue reports whether a value begins after a text: that of an
// attribute, or that of an element.
func beginsValue(before []byte) bool {
	if n := len(before); n > 1 && (before[n-1] == '"' || before[n-1] == '\'') {
		return bytes.HasSuffix(bytes.TrimRight(before[:n-1], " \t\r\n"), []byte("="))
	}
	return bytes.HasSuffix(bytes.TrimSpace(before), []byte(">"))
}

// expressionEnd returns the length of the expression that a text begins with.
// It is negative if it has no end.
func expressionEnd(code string) int {
	depth := 0
	for i := 1; i < len(code); {
		switch n, kind := nextOf(code[i:]); {
		case kind != other:
			i += n
		default:
			switch code[i] {
			case '(', '{', '[':
				depth++
			case ')', '}', ']':
				if depth--; depth == 0 {
					return i + 1
				}
			}
			i++
		}
	}
	return -1
}

// withoutComments returns C# with its comments as spaces. Lines stay where they
// are.
func withoutComments(code string) string {
	var out strings.Builder
	for i := 0; i < len(code); {
		n, kind := nextOf(code[i:])
		if kind == comment {
			out.WriteString(" " + strings.Repeat("\n", strings.Count(code[i:i+n], "\n")))
		} else {
			out.WriteString(code[i : i+n])
		}
		i += n
	}
	return out.String()
}

// kindOfCode is a kind of a piece of C#.
type kindOfCode int

const (
	other kindOfCode = iota
	literalText
	comment
)

// nextOf returns the length and the kind of the piece that a text in C# begins
// with.
func nextOf(code string) (n int, kind kindOfCode) {
	upTo := func(mark string, from int) int {
		if i := strings.Index(code[from:], mark); i >= 0 {
			return from + i + len(mark)
		}
		return len(code)
	}
	switch {
	case strings.HasPrefix(code, "//"):
		if i := strings.IndexByte(code, '\n'); i >= 0 {
			return i, comment
		}
		return len(code), comment
	case strings.HasPrefix(code, "/*"):
		return upTo("*/", 2), comment
	case strings.HasPrefix(code, `@"`):
		for i := 2; i < len(code); i++ {
			if code[i] == '"' {
				if i+1 < len(code) && code[i+1] == '"' {
					i++
					continue
				}
				return i + 1, literalText
			}
		}
		return len(code), literalText
	case code[0] == '"' || code[0] == '\'':
		for i := 1; i < len(code); i++ {
			switch code[i] {
			case '\\':
				i++
			case code[0]:
				return i + 1, literalText
			}
		}
		return len(code), literalText
	}
	return 1, other
}
