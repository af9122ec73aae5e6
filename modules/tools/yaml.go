package tools

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// yamlReader reads a YAML file. Its first error stays, and what is read after
// it is empty. Each error names a line, and no value that may be a key.
type yamlReader struct{ err error }

// mapping is a mapping of a YAML file. Its entries are taken out one by one:
// the rest does not carry over.
type mapping struct {
	*yamlReader
	line  int
	names []string
	rest  map[string]entry
}

// entry is a value and the line of its name.
type entry struct {
	line  int
	value *yaml.Node
}

func (r *yamlReader) fail(line int, format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("line %d: %s", max(line, 1), fmt.Sprintf(format, args...))
	}
}

// file returns the mapping that a file is.
func (r *yamlReader) file(text []byte) mapping {
	for i, l := range bytes.Split(text, []byte("\n")) {
		if !utf8.Valid(l) || bytes.ContainsFunc(l, isControl) {
			r.fail(i+1, "expected text in UTF-8 without control characters")
		}
	}
	if r.err != nil {
		return mapping{}
	}
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	var root, second yaml.Node
	err := decodeYAML(decoder, &root)
	if err == nil {
		if err = decodeYAML(decoder, &second); err == nil {
			r.fail(second.Line, "expected one YAML document, and found a second one")
		}
	}
	switch {
	case !errors.Is(err, io.EOF):
		r.parserError(text, err)
	case root.Kind != yaml.DocumentNode || len(root.Content) != 1:
		r.fail(1, "the file is empty")
	default:
		return r.mapping(root.Content[0], "the file")
	}
	return mapping{}
}

// decode reads a document. The parser panics at mistakes of its own:
// https://github.com/mikefarah/yq/issues/2481
func decodeYAML(decoder *yaml.Decoder, into *yaml.Node) (err error) {
	defer func() {
		if recover() != nil {
			err = errors.New("the YAML parser cannot read the file: remove its comments, and try again")
		}
	}()
	return decoder.Decode(into)
}

func isControl(r rune) bool { return r < ' ' && r != '\t' && r != '\r' || r == 0x7f }

var unknownAnchor = regexp.MustCompile(`unknown anchor '(.*)' referenced`)

// parserError adds the line to an error of the parser, which leaves it out now
// and then.
func (r *yamlReader) parserError(text []byte, err error) {
	if r.err != nil || err == nil {
		return
	}
	problem := strings.TrimPrefix(err.Error(), "yaml: ")
	if lineNumber.MatchString(problem) {
		r.err = errors.New(problem)
		return
	}
	before := 0
	if match := unknownAnchor.FindStringSubmatch(problem); match != nil {
		before = max(bytes.Index(text, []byte("*"+match[1])), 0)
	}
	r.fail(1+bytes.Count(text[:before], []byte("\n")), "%s", problem)
}

// resolved follows an alias to what it stands for.
func resolved(n *yaml.Node) *yaml.Node {
	for i := 0; n != nil && n.Kind == yaml.AliasNode && i < 100; i++ {
		n = n.Alias
	}
	return n
}

func isNull(n *yaml.Node) bool {
	n = resolved(n)
	return n == nil || n.Kind == yaml.ScalarNode && n.Tag == "!!null"
}

// mapping returns a mapping. Null is an empty one. The name of the value is for
// errors.
func (r *yamlReader) mapping(n *yaml.Node, name string) mapping {
	m := mapping{yamlReader: r, rest: make(map[string]entry)}
	if n != nil {
		m.line = n.Line
	}
	if !isNull(n) {
		m.add(resolved(n), name, make(map[*yaml.Node]bool))
	}
	return m
}

// add adds the entries of a mapping that it does not have yet, and then those
// of its merge key <<.
func (m *mapping) add(n *yaml.Node, name string, added map[*yaml.Node]bool) {
	if n.Kind != yaml.MappingNode {
		m.fail(n.Line, "expected %s to be a mapping of names to values", name)
		return
	}
	if added[n] { // also a mapping that contains itself
		return
	}
	added[n] = true
	seen := make(map[string]int, len(n.Content)/2)
	var merges []*yaml.Node
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := resolved(n.Content[i]), n.Content[i+1]
		first, twice := seen[key.Value]
		switch _, known := m.rest[key.Value]; {
		case key.Kind != yaml.ScalarNode:
			m.fail(key.Line, "expected a name in %s", name)
		case key.Tag == "!!merge" && resolved(value).Kind == yaml.SequenceNode:
			merges = append(merges, resolved(value).Content...)
		case key.Tag == "!!merge":
			merges = append(merges, value)
		case twice:
			m.fail(key.Line, "%s is given twice, first on line %d", shown(key.Value), first)
		case !known:
			m.names = append(m.names, key.Value)
			m.rest[key.Value] = entry{key.Line, value}
			fallthrough
		default:
			seen[key.Value] = key.Line
		}
	}
	for _, merge := range merges {
		m.add(resolved(merge), "the value of <<", added)
	}
}

// take removes an entry and returns its value, or nil.
func (m *mapping) take(name string) *yaml.Node {
	value := m.rest[name].value
	delete(m.rest, name)
	return value
}

// text takes a text. Without one it is empty.
func (m *mapping) text(name string) (text string, line int) {
	n := m.take(name)
	switch r := resolved(n); {
	case isNull(n):
		return "", m.line
	case r.Kind != yaml.ScalarNode:
		m.fail(n.Line, "expected %s to be a text or a number", shown(name))
		return "", n.Line
	default:
		return strings.TrimSpace(r.Value), n.Line
	}
}

// left returns the names of the entries that were not taken, in their order.
func (m *mapping) left() (names []string) {
	for _, name := range m.names {
		if _, ok := m.rest[name]; ok {
			names = append(names, name)
		}
	}
	return names
}

// list returns the values of a list. Null is an empty one.
func (r *yamlReader) list(n *yaml.Node, name string) []*yaml.Node {
	if isNull(n) {
		return nil
	}
	if resolved(n).Kind != yaml.SequenceNode {
		r.fail(n.Line, "expected %s to be a list", name)
		return nil
	}
	return resolved(n).Content
}
