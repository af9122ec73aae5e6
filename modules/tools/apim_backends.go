package tools

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/backend"
)

// readJSON reads a backend, a list of them as the CLI of Azure prints it, or a
// template.
func (a *apim) readJSON(text []byte) error {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	var root any
	err := decoder.Decode(&root)
	if err == nil {
		if _, err = decoder.Token(); err == nil {
			return fmt.Errorf("line %d: expected one JSON value, and found a second one",
				lineAt(text, decoder.InputOffset()))
		} else if errors.Is(err, io.EOF) {
			err = nil
		}
	}
	var syntax *json.SyntaxError
	switch {
	case errors.As(err, &syntax):
		return fmt.Errorf("line %d: %w", lineAt(text, syntax.Offset), syntax)
	case err != nil:
		return fmt.Errorf("line %d: expected JSON, or the XML of a policy: %w", lineAt(text, int64(len(text))), err)
	}
	before := len(a.backends) + len(a.pools)
	seen := a.policy.seen
	if err := a.readResources(root); err != nil {
		return err
	}
	if len(a.backends)+len(a.pools) == before && a.policy.seen == seen {
		return errors.New("line 1: expected backends of API Management, such as from 'az rest', or a template with them")
	}
	return nil
}

// readResources reads all resources in a value, also those within others.
func (a *apim) readResources(value any) error {
	switch value := value.(type) {
	case []any:
		for _, v := range value {
			if err := a.readResources(v); err != nil {
				return err
			}
		}
	case map[string]any:
		if properties := object(value["properties"]); properties != nil {
			if err := a.readResource(resourceName(textOf(value["name"])), properties); err != nil {
				return err
			}
			if err := a.readResources(object(properties["template"])["resources"]); err != nil {
				return err
			}
		}
		if err := a.readResources(value["value"]); err != nil {
			return err
		}
		if symbols := object(value["resources"]); symbols != nil { // of a template with symbolic names
			for _, symbol := range slices.Sorted(maps.Keys(symbols)) {
				if err := a.readResources(symbols[symbol]); err != nil {
					return err
				}
			}
			return nil
		}
		return a.readResources(value["resources"])
	}
	return nil
}

// readResource reads a resource if it is a backend or a policy. Resources of
// other kinds have other properties.
func (a *apim) readResource(name string, properties map[string]any) error {
	switch policy := textOf(properties["value"]); {
	case strings.HasPrefix(strings.TrimSpace(policy), "<policies"):
		return a.readInnerPolicy(name, policy)
	case strings.EqualFold(textOf(properties["type"]), "Pool") || properties["pool"] != nil:
		a.readPool(name, properties)
	case textOf(properties["url"]) != "" && textOf(properties["protocol"]) != "":
		a.readBackend(name, properties)
	}
	return nil
}

// readInnerPolicy reads a policy that is a text in JSON, so that its lines are
// not those of the file.
func (a *apim) readInnerPolicy(name, text string) error {
	before := len(a.notes)
	if err := a.readPolicy([]byte(text)); err != nil {
		return fmt.Errorf("the policy %s: %w", shown(name), err)
	}
	for i := range a.notes[before:] {
		n := &a.notes[before+i]
		n.line, n.text = 0, fmt.Sprintf("policy %s, line %d: %s", shown(name), n.line, n.text)
	}
	for i := range a.policy.listed {
		a.policy.listed[i].line = 0
	}
	for i := range a.policy.headers {
		a.policy.headers[i].line = 0
	}
	return nil
}

func (a *apim) readPool(name string, properties map[string]any) {
	p := apimPool{name: name}
	p.notes = notesOf(properties, "pool "+shown(name), "type", "pool", "title", "description", "url", "protocol")
	pool := object(properties["pool"])
	if len(pool) > 1 {
		p.notes = append(p.notes, notesOf(pool, "pool "+shown(name), "services")...)
	}
	services, _ := pool["services"].([]any)
	for _, service := range services {
		s := object(service)
		m := apimMember{name: resourceName(textOf(s["id"]))}
		about := "pool " + shown(name) + ", backend " + shown(m.name)
		p.notes = append(p.notes, notesOf(s, about, "id", "priority", "weight")...)
		if priority, ok := wholeNumber(s["priority"], 1_000_000); ok {
			m.priority = priority
		} else if s["priority"] != nil {
			p.notes = append(p.notes, about+": the priority is not a whole number")
		}
		if weight, ok := wholeNumber(s["weight"], backend.MaxWeight); ok {
			m.weight = strconv.Itoa(weight)
		} else if s["weight"] != nil {
			p.notes = append(p.notes, about+": the weight is not a whole number")
		}
		p.members = append(p.members, m)
	}
	a.pools = append(a.pools, p)
}

func (a *apim) readBackend(name string, properties map[string]any) {
	b := &apimBackend{block: block{name: name, url: textOf(properties["url"])}}
	about := "backend " + shown(name)
	b.notes = notesOf(properties, about, "type", "url", "protocol", "title", "description", "resourceId", "credentials",
		"circuitBreaker", "tls")
	credentials := object(properties["credentials"])
	b.notes = append(b.notes, notesOf(credentials, about, "header", "authorization", "managedIdentity")...)
	headers := object(credentials["header"])
	for _, header := range slices.Sorted(maps.Keys(headers)) {
		value := firstText(headers[header])
		switch {
		case strings.EqualFold(header, "api-key"):
			a.setKey(&b.block, value, 0)
		case strings.EqualFold(header, "Authorization"):
			a.setBearer(&b.block, value, 0)
		default:
			a.addHeader(&b.block, header, value, a.placeholderOf(value), 0)
		}
	}
	if authorization := object(credentials["authorization"]); authorization != nil {
		a.setBearer(&b.block, textOf(authorization["scheme"])+" "+textOf(authorization["parameter"]), 0)
	}
	if identity := object(credentials["managedIdentity"]); identity != nil && b.key == "" {
		a.setIdentity(&b.block, textOf(identity["clientId"]))
	}
	if tls := object(properties["tls"]); tls["validateCertificateChain"] == false ||
		tls["validateCertificateName"] == false {
		b.notes = append(b.notes, about+": tls: certificates are checked; name the CA in the transport of the block, see docs/options.md")
	}
	rules, _ := object(properties["circuitBreaker"])["rules"].([]any)
	for _, rule := range rules {
		r := object(rule)
		b.notes = append(b.notes, hintOfAPIM("failureCondition"))
		if r["acceptRetryAfter"] != true {
			b.notes = append(b.notes, about+": acceptRetryAfter: Retry-After always counts")
		}
		if seconds, ok := durationOf(textOf(r["tripDuration"])); ok {
			b.trips = append(b.trips, seconds)
		} else if r["tripDuration"] != nil {
			b.notes = append(b.notes, about+": tripDuration: expected a duration such as PT1M")
		}
	}
	a.backends = append(a.backends, b)
}

// notesOf returns a note for each property that is set, apart from those that
// are known.
func notesOf(properties map[string]any, about string, known ...string) (notes []string) {
	for _, name := range slices.Sorted(maps.Keys(properties)) {
		switch value := properties[name].(type) {
		case nil:
			continue
		case map[string]any:
			if len(value) == 0 {
				continue
			}
		case []any:
			if len(value) == 0 {
				continue
			}
		}
		if !slices.Contains(known, name) {
			notes = append(notes, about+": "+hintOfAPIM(name))
		}
	}
	return notes
}

// resourceName returns the last part of the name or the ID of a resource, also
// of one that a template computes.
func resourceName(text string) string {
	text = cmp.Or(lastLiteral(text), text)
	return text[strings.LastIndexByte(text, '/')+1:]
}

func object(value any) map[string]any {
	m, _ := value.(map[string]any)
	return m
}

func textOf(value any) string {
	text, _ := value.(string)
	return text
}

// firstText returns a text, or the first one of a list.
func firstText(value any) string {
	if list, _ := value.([]any); len(list) > 0 {
		value = list[0]
	}
	return textOf(value)
}

// wholeNumber returns a number, which templates may write as a text.
func wholeNumber(value any, most int) (int, bool) {
	text := textOf(value)
	if number, ok := value.(json.Number); ok {
		text = number.String()
	}
	n, err := strconv.Atoi(text)
	return n, err == nil && n >= 0 && n <= most
}

// iso8601 matches a duration without months and years.
var iso8601 = regexp.MustCompile(`^P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?$`)

// durationOf returns the seconds of a duration such as PT1M.
func durationOf(text string) (seconds float64, ok bool) {
	match := iso8601.FindStringSubmatch(text)
	if match == nil {
		return 0, false
	}
	for i, unit := range []float64{24 * 60 * 60, 60 * 60, 60, 1} {
		if n, err := strconv.ParseFloat(match[i+1], 64); err == nil {
			seconds += n * unit
		}
	}
	return seconds, seconds > 0
}
