package tools

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/cli"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
)

// site is a Caddyfile that an import makes: one site with one openai_lb.
type site struct {
	notes []note
	// options are lines of the balancer after its backends.
	options []string
	blocks  []*block
}

// note is a comment about something that does not carry over. Its line is 0 if it is not about a line.
type note struct {
	line int
	text string
}

// block is a backend of a Caddyfile.
type block struct {
	url        string
	name       string
	priority   int // 0 writes none
	weight     string
	auth       string
	key        string
	deployment string
	requests   int
	header     [][2]string
	// comments are lines before the key.
	comments []string
	// models are names of models, and what the backend calls them. Without one, the backend serves any model.
	models [][2]string
}

// note adds a comment. Its text may contain any characters.
func (s *site) note(line int, text string) { s.notes = append(s.notes, note{line, text}) }

// option adds an option of the balancer.
func (s *site) option(words ...string) { s.options = append(s.options, directive.Line(words...)) }

// caddyfile writes the file as `caddy fmt` does.
func (s *site) caddyfile() string {
	lines := []string{"# Imported from LiteLLM. What does not carry over:"}
	for _, text := range s.mergedNotes() {
		lines = append(lines, directive.Comment("- "+text))
	}
	lines = append(lines, "", ":4000 {", "\topenai_lb {")
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

// mergedNotes returns the notes by their lines. Notes of the same text become one.
func (s *site) mergedNotes() (texts []string) {
	lines := make(map[string][]string)
	slices.SortStableFunc(s.notes, func(a, b note) int { return cmp.Compare(a.line, b.line) })
	for _, n := range slices.Compact(s.notes) {
		if lines[n.text] == nil {
			texts = append(texts, n.text)
		}
		lines[n.text] = append(lines[n.text], strconv.Itoa(n.line))
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
	if b.auth != "" {
		add("auth", b.auth)
	}
	for _, text := range b.comments {
		lines = append(lines, directive.Comment(text))
	}
	if b.key != "" {
		add("api_key", b.key)
	}
	for _, h := range b.header {
		add("header", h[0], h[1])
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

// shown shows a name of the imported configuration in a comment or an error.
func shown(name string) string {
	if len(name) > 64 {
		name = name[:64] + "…"
	}
	return "'" + cli.Printable(name) + "'"
}

// decimal writes a number without an exponent.
func decimal(n float64) string { return strconv.FormatFloat(n, 'f', -1, 64) }
