package admin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/openai-lb/caddy-openai-lb/internal/cli"
)

// Ask returns the admin API's answer. Its errors are plain text, also if
// something else answers.
func Ask(address, method, path string, query url.Values) ([]byte, error) {
	if len(query) > 0 {
		path += "?" + query.Encode()
	}
	res, err := caddycmd.AdminAPIRequest(address, method, path, nil, nil)
	if method == http.MethodGet && isDropped(err) {
		res, err = caddycmd.AdminAPIRequest(address, method, path, nil, nil)
	}
	if err != nil {
		var reply struct{ Error string }
		if _, body, ok := strings.Cut(err.Error(), ": {"); ok && json.Unmarshal([]byte("{"+body), &reply) == nil &&
			reply.Error != "" {
			return nil, errors.New(cli.Printable(reply.Error))
		}
		return nil, fmt.Errorf("the admin API at %s: %s", cli.Printable(address), cli.Printable(err.Error()))
	}
	defer res.Body.Close()
	return cli.ReadUpTo(res.Body, MaxAnswers)
}

// isDropped reports whether the server closed the connection without an answer.
// A reload of Caddy replaces the server of the admin API, and Go's HTTP server
// drops the connections on which a first request arrives while it shuts down.
func isDropped(err error) bool {
	return err != nil && strings.HasSuffix(err.Error(), io.EOF.Error()) // AdminAPIRequest wraps no error
}

// Decode reads an answer of the admin API.
func Decode(answer []byte, into any) error {
	if err := json.Unmarshal(answer, into); err != nil {
		return fmt.Errorf("could not read the admin API's answer: %w", err)
	}
	return nil
}

// ShowJSON prints the answer as it is, if it is JSON.
func ShowJSON(to io.Writer, answer []byte) error {
	if err := Decode(answer, new(json.RawMessage)); err != nil {
		return err
	}
	_, err := fmt.Fprintf(to, "%s\n", escaped(bytes.TrimSpace(answer)))
	return err
}

// escaped escapes the characters in JSON that are not printable, which only its
// strings can have.
func escaped(text []byte) []byte {
	if !bytes.ContainsFunc(text, isHidden) {
		return text
	}
	var b []byte
	for _, r := range string(text) {
		if !isHidden(r) {
			b = utf8.AppendRune(b, r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			b = fmt.Appendf(b, `\u%04x`, unit)
		}
	}
	return b
}

func isHidden(r rune) bool { return r >= 0x7f && !unicode.IsPrint(r) }

// ShowAll prints the rows of an answer, and whose they are: below a table, or
// next to JSON.
func ShowAll(command *cobra.Command, show func(io.Writer, []byte) error, asJSON bool, answer []byte) error {
	var all All[json.RawMessage]
	if err := Decode(answer, &all); err != nil {
		return err
	}
	rows, err := json.Marshal(all.Rows)
	if err == nil {
		err = show(command.OutOrStdout(), rows)
	}
	to := command.OutOrStdout()
	if asJSON {
		to = command.ErrOrStderr()
	}
	ShowWhose(to, all.Connected, all.Replicas)
	return err
}

// ShowWhose prints which replicas are in a table.
func ShowWhose(to io.Writer, connected bool, seen []Seen) {
	if len(seen) == 0 {
		return
	}
	var names []string
	for _, s := range seen {
		name := s.Name()
		switch {
		case s.Self:
			name += " (asked)"
		case !s.Included:
			name += " (no answer, last heard " + cli.UTC(s.Heard) + ")"
		}
		names = append(names, name)
	}
	text := "replicas: " + strings.Join(names, ", ")
	if !connected {
		lacks := "not connected to other replicas: this is what one knows"
		if slices.ContainsFunc(seen, func(s Seen) bool { return s.Included && !s.Self }) {
			lacks = "not connected to all replicas: this is what some know"
		}
		text = lacks + "; " + text
	}
	fmt.Fprintln(to, text)
}
