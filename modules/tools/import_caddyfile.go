package tools

import (
	"cmp"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/openai-lb/caddy-openai-lb/internal/cli"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// site is a Caddyfile that an import makes: one site with one openai_lb.
type site struct {
	// source is the balancer whose configuration is imported.
	source string
	// address is the address of the site.
	address string
	notes   []note
	// options are lines of the balancer after its backends.
	options []string
	blocks  []*block
	// placeholders are the variables for literal keys, and taken the names of
	// all variables.
	placeholders map[string]string
	taken        map[string]bool
}

func newSite(source, address string) *site {
	return &site{source: source, address: address, placeholders: make(map[string]string), taken: make(map[string]bool)}
}

// note is a comment about something that does not carry over. Its line is 0 if
// it is not about a line.
type note struct {
	line int
	text string
}

// block is a backend of a Caddyfile.
type block struct {
	url      string
	name     string
	priority int // 0 writes none
	weight   string
	auth     string
	// authOptions are lines of the block of auth.
	authOptions [][2]string
	key         string
	deployment  string
	requests    int
	header      [][2]string
	// comments are lines before the key.
	comments []string
	// models are names of models, and what the backend calls them. Without one,
	// the backend serves any model.
	models [][2]string
}

// note adds a comment. Its text may contain any characters.
func (s *site) note(line int, text string) { s.notes = append(s.notes, note{line, text}) }

// option adds an option of the balancer.
func (s *site) option(words ...string) { s.options = append(s.options, directive.Line(words...)) }

// caddyfile writes the file as `caddy fmt` does.
func (s *site) caddyfile() string {
	lines := []string{"# Imported from " + s.source + ". What does not carry over:"}
	for _, text := range s.mergedNotes() {
		lines = append(lines, directive.Comment("- "+text))
	}
	lines = append(lines, "", s.address+" {", "\topenai_lb {")
	for _, text := range s.lines() {
		if text != "" {
			text = "\t\t" + text
		}
		lines = append(lines, text)
	}
	return strings.Join(append(lines, "\t}", "}", ""), "\n")
}

// lines are the lines of the balancer's block.
func (s *site) lines() (lines []string) {
	for _, b := range s.blocks {
		lines = append(lines, directive.Line("backend", b.url)+" {")
		for _, text := range b.lines() {
			lines = append(lines, "\t"+text)
		}
		lines = append(lines, "}")
	}
	if len(s.options) > 0 {
		lines = append(lines, "")
	}
	return append(lines, s.options...)
}

// mergedNotes returns the notes by their lines. Notes of the same text become
// one.
func (s *site) mergedNotes() (texts []string) {
	lines := make(map[string][]string)
	slices.SortStableFunc(s.notes, func(a, b note) int { return cmp.Compare(a.line, b.line) })
	for _, n := range s.notes {
		if lines[n.text] == nil {
			texts = append(texts, n.text)
		}
		if number := strconv.Itoa(n.line); !slices.Contains(lines[n.text], number) {
			lines[n.text] = append(lines[n.text], number)
		}
	}
	for i, text := range texts {
		switch numbers := strings.Join(lines[text], ", "); {
		case strings.Contains(numbers, ","):
			texts[i] = "lines " + numbers + ": " + text
		case numbers != "0":
			texts[i] = "line " + numbers + ": " + text
		}
	}
	return texts
}

// lines are the lines of a backend's block.
func (b *block) lines() (lines []string) {
	add := func(words ...string) { lines = append(lines, directive.Line(words...)) }
	if b.name != "" {
		add("name", b.name)
	}
	if b.priority > 0 {
		add("priority", strconv.Itoa(b.priority))
	}
	if b.weight != "" {
		add("weight", b.weight)
	}
	switch {
	case len(b.authOptions) > 0:
		lines = append(lines, directive.Line("auth", b.auth)+" {")
		for _, option := range b.authOptions {
			lines = append(lines, "\t"+directive.Line(option[:]...))
		}
		lines = append(lines, "}")
	case b.auth != "":
		add("auth", b.auth)
	}
	for _, text := range b.comments {
		lines = append(lines, directive.Comment(text))
	}
	if b.key != "" {
		add("api_key", b.key)
	}
	for _, h := range b.header {
		add(slices.DeleteFunc([]string{"header", h[0], h[1]}, func(word string) bool { return word == "" })...)
	}
	if b.deployment != "" {
		add("deployment", b.deployment)
	}
	if b.requests > 0 {
		add("max_requests", strconv.Itoa(b.requests))
	}
	for _, m := range b.models {
		add(append([]string{"model"}, slices.Compact(m[:])...)...)
	}
	return lines
}

// literal returns the placeholder for a literal key. Its name is not used
// otherwise.
func (s *site) literal(key, name string) string {
	if s.placeholders[key] == "" {
		s.placeholders[key] = "{env." + take(s.taken, name, "_") + "}"
	}
	return s.placeholders[key]
}

// take takes a name, with a number after it if that is taken.
func take(taken map[string]bool, name, separator string) string {
	free := name
	for i := 2; taken[free]; i++ {
		free = name + separator + strconv.Itoa(i)
	}
	taken[free] = true
	return free
}

var notOfName = regexp.MustCompile(`[^A-Z0-9]+`)

// variableName makes the name of a variable.
func variableName(text string) string {
	return strings.Trim(notOfName.ReplaceAllString(strings.ToUpper(text), "_"), "_")
}

// keyName names the variable for the key of a backend, such as
// CONTOSO_EAST_KEY.
func keyName(rawURL string) string {
	u, err := url.Parse(rawURL)
	if err != nil || u.Hostname() == "" {
		return variableName(strings.TrimPrefix(rawURL, "{env.")) + "_KEY"
	}
	if openaiapi.IsOpenAI(u.Hostname()) {
		return "OPENAI_API_KEY"
	}
	first, _, _ := strings.Cut(u.Hostname(), ".")
	name := variableName(first + " key")
	if name[0] <= '9' {
		name = "BACKEND_" + name
	}
	return name
}

// withoutAPI removes the path of an API from a URL at Azure: the balancer adds
// it.
func withoutAPI(u *url.URL) {
	for _, mark := range []string{"/openai/", "/models/"} {
		if i := strings.LastIndex(u.Path+"/", mark); i >= 0 {
			u.Path, u.RawPath = u.Path[:i], ""
		}
	}
}

var (
	// mayBeKey matches keys of OpenAI and others that follow it, and values of
	// Authorization.
	mayBeKey = regexp.MustCompile(`(?i)\b(sk-|(bearer|basic) )`)
	// mayBePassword matches names of headers.
	mayBePassword = regexp.MustCompile(`(?i)pass|pwd|signature`)
)

// addHeader adds a header of a backend. The placeholder of its value is empty
// if the value is literal: one that may be a key becomes a variable.
func (s *site) addHeader(b *block, name, value, placeholder string, at int) {
	_, ok := directive.Word(value)
	switch {
	case slices.ContainsFunc(b.header, func(other [2]string) bool { return strings.EqualFold(other[0], "-"+name) }),
		!httpguts.ValidHeaderFieldName(name) || strings.HasPrefix(name, "-") ||
			strings.EqualFold(name, "Authorization") || strings.EqualFold(name, "Host"):
		s.note(at, "the header "+shown(name)+" cannot be set by the option header")
		return
	case placeholder != "":
		value = placeholder
	case keys.MayHoldKey(name), mayBeKey.MatchString(value), mayBePassword.MatchString(name):
		value = s.literal(value, "HEADER_"+variableName(name))
		b.comments = append(b.comments, setVariable("The value of "+name, at))
	case !ok:
		s.note(at, "the value of the header "+shown(name)+" must not be empty, or contain control characters, braces or backslashes")
		return
	}
	b.header = append(b.header, [2]string{name, value})
}

// setVariable is the comment about a literal that a variable replaces. Its line
// is 0 if it is not known.
func setVariable(what string, line int) string {
	if line == 0 {
		return what + " was in the file: set the variable."
	}
	return fmt.Sprintf("%s was on line %d: set the variable.", what, line)
}

// shown shows a name of the imported configuration in a comment or an error.
func shown(name string) string {
	if len(name) > 64 {
		name = name[:64] + "…"
	}
	return "'" + cli.Printable(name) + "'"
}

// decimal writes a number without an exponent.
func decimal(n float64) string { return strconv.FormatFloat(n, 'f', -1, 64) }
