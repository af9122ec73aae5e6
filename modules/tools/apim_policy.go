package tools

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/backend"
)

// apimPolicy has the parts of a policy about backends and callers.
type apimPolicy struct {
	seen bool
	// listed are the backends of a list in the policy, such as that of
	// Microsoft's sample openai-apim-lb.
	listed []apimMember
	// backend is the backend or the pool that the policy names. Without either,
	// it has no name and no URL.
	backend apimMember
	// headers are those of requests for backends.
	headers []apimHeader
	// identity reports whether API Management signs in with its own identity;
	// clientID may name one.
	identity bool
	clientID string
	// retries is negative without a retry.
	retries int
	timeout string
	limits  []apimLimit
}

type apimHeader struct {
	line        int
	name, value string
	removed     bool
}

// apimLimit is a limit of each caller.
type apimLimit struct{ counted, amount, unit string }

// apimHints say what to do about parts of API Management that do not carry
// over. Each begins with their names.
var apimHints = []string{
	"failureCondition: one failure makes a backend a suspect, and the class of a reply decides, see docs/replies.md",
	"certificate, certificateIds: a client certificate is set in the transport of the block, see docs/options.md",
	"query: a backend has no query; if it held a key, write it as api_key or header",
	"proxy: set the proxy in the transport of the block, see docs/options.md",
	"preferredCarbonEmission, azureRegion: backends are not chosen by emissions",
	"sessionAffinity: conversations and stored objects stay at their backend, see docs/affinity.md",
	"failureResponse: the balancer has its own answer if no backend serves, see docs/reference.md",
	"azure-openai-emit-token-metric, llm-emit-token-metric: the metrics and the bill have the tokens of each caller",
	"azure-openai-semantic-cache-lookup, azure-openai-semantic-cache-store, llm-semantic-cache-lookup, llm-semantic-cache-store, cache-lookup, cache-store: replies are not cached",
	"llm-content-safety: contents are not checked",
	"validate-jwt, validate-azure-ad-token: write caller_identity oidc with the issuer and the audience, see oidc/README.md",
	"check-header, ip-filter: write a matcher of Caddy for openai_lb",
	"cors: write Caddy's header before openai_lb",
	"log-to-eventhub, trace, emit-metric: use the access log, metrics and traces",
	"limit-concurrency: write max_requests in the block of a backend or a caller",
	"rewrite-uri: the options url, deployment and model of a backend decide on the path",
	"set-body, find-and-replace: bodies are passed on unchanged",
	"return-response, set-status: write Caddy's handle_errors or respond",
	"send-request, send-one-way-request: no other request is sent",
}

// hintOfAPIM returns the note for a part that does not carry over.
func hintOfAPIM(name string) string {
	for _, hint := range apimHints {
		names, _, _ := strings.Cut(hint, ":")
		if slices.Contains(strings.Split(names, ", "), name) {
			return hint
		}
	}
	return shown(name) + " does not carry over"
}

// silent are elements and variables with which policies of Microsoft's samples
// choose a backend: all of it is done here.
var silent = []string{"policies", "inbound", "backend", "outbound", "on-error", "base", "cache-lookup-value",
	"cache-store-value", "cache-remove-value",
	"listBackends", "backendIndex", "remainingBackends", "backendUrl", "backend-id"}

// readPolicy reads a policy. In one that was not exported as XML, expressions
// have characters that XML does not allow.
func (a *apim) readPolicy(text []byte) error {
	if checkXML(text) != nil {
		escaped, err := escapeExpressions(text)
		if err != nil {
			return err
		}
		text = escaped
	}
	if err := checkXML(text); err != nil {
		return err
	}
	if a.policy.seen {
		return errors.New("line 1: expected one policy, and found a second one")
	}
	a.policy.seen = true
	decoder := xml.NewDecoder(bytes.NewReader(text))
	var open []string
	var element xml.StartElement
	var line int
	var content strings.Builder
	for {
		token, err := decoder.Token()
		if err != nil {
			return nil // checkXML read the same text to its end
		}
		switch token := token.(type) {
		case xml.StartElement:
			element = token.Copy()
			line, _ = decoder.InputPos()
			line -= strings.Count(attributesOf(token), "\n")
			open = append(open, token.Name.Local)
			content.Reset()
			a.readElement(open, element, line)
		case xml.CharData:
			content.Write(token)
		case xml.EndElement:
			if token.Name.Local == "value" && len(open) > 1 && open[len(open)-2] == "set-header" &&
				len(a.policy.headers) > 0 {
				a.policy.headers[len(a.policy.headers)-1].value = strings.TrimSpace(content.String())
			}
			open = open[:len(open)-1]
			if token.Name.Local == "set-header" {
				a.checkHeader(open)
			}
		}
	}
}

func attributesOf(element xml.StartElement) string {
	var all strings.Builder
	for _, attribute := range element.Attr {
		all.WriteString(attribute.Value)
	}
	return all.String()
}

// checkXML returns an error with a line if a text is not XML.
func checkXML(text []byte) error {
	decoder := xml.NewDecoder(bytes.NewReader(text))
	for root := false; ; {
		token, err := decoder.Token()
		var syntax *xml.SyntaxError
		switch start, ok := token.(xml.StartElement); {
		case errors.Is(err, io.EOF) && root:
			return nil
		case errors.As(err, &syntax):
			return fmt.Errorf("line %d: expected XML: %s", syntax.Line, syntax.Msg)
		case err != nil:
			line, _ := decoder.InputPos()
			return fmt.Errorf("line %d: expected XML in UTF-8 with the element policies", line)
		case ok && !root && start.Name.Local != "policies":
			line, _ := decoder.InputPos()
			return fmt.Errorf("line %d: expected the element policies, and found %s", line, shown(start.Name.Local))
		case ok:
			root = true
		}
	}
}

// readElement reads an element, the last of those that are open.
func (a *apim) readElement(open []string, element xml.StartElement, line int) {
	p := &a.policy
	name := element.Name.Local
	attribute := func(name string) string {
		for _, attribute := range element.Attr {
			if attribute.Name.Local == name {
				return attribute.Value
			}
		}
		return ""
	}
	parent := ""
	if len(open) > 1 {
		parent = open[len(open)-2]
	}
	switch name {
	case "set-variable":
		if listed := a.readList(attribute("value"), line); len(listed) > 0 {
			p.listed = append(p.listed, listed...)
		} else if variable := attribute("name"); !slices.Contains(silent, variable) {
			a.note(line, "set-variable: "+shown(variable)+" does not carry over")
		}
	case "set-backend-service":
		a.readBackendService(attribute("backend-id"), attribute("base-url"), line)
	case "authentication-managed-identity":
		p.identity, p.clientID = true, attribute("client-id")
	case "set-header":
		p.headers = append(p.headers,
			apimHeader{line: line, name: attribute("name"), removed: attribute("exists-action") == "delete"})
	case "retry":
		if n, err := strconv.Atoi(attribute("count")); err == nil && n >= 0 {
			p.retries = n
		}
		a.note(line, "retry: a request fails over immediately, and the class of a reply decides whether, see docs/replies.md")
	case "forward-request":
		if n, err := strconv.Atoi(attribute("timeout")); err == nil && n > 0 && n <= longest {
			p.timeout = strconv.Itoa(n) + "s"
		}
	case "azure-openai-token-limit", "llm-token-limit":
		a.readCounterKey(name, attribute("counter-key"), line)
		a.addLimit(line, name, "tokens", attribute("tokens-per-minute"), "minute")
		a.addLimit(line, name, "tokens", attribute("token-quota"), quotaPeriods[attribute("token-quota-period")])
	case "rate-limit", "rate-limit-by-key", "quota", "quota-by-key":
		if strings.HasSuffix(name, "-by-key") {
			a.readCounterKey(name, attribute("counter-key"), line)
		}
		a.addLimit(line, name, "requests", attribute("calls"), renewalPeriods[attribute("renewal-period")])
		if attribute("bandwidth") != "" {
			a.note(line, name+": bandwidth: there is no limit of bytes")
		}
	case "choose", "otherwise":
	case "when":
		if !strings.Contains(attribute("condition"), "listBackends") && !strings.Contains(attribute("condition"), "context.Response") {
			a.note(line, "choose: its conditions do not carry over, so the parts within them hold for all requests; write a site or a route with its own openai_lb for each")
		}
	case "value":
		if parent != "set-header" {
			a.note(line, hintOfAPIM(name))
		}
	default:
		known := slices.ContainsFunc(open[:len(open)-1],
			func(outer string) bool { return !slices.Contains(containers, outer) })
		if !known && !slices.Contains(silent, name) { // a part of what has a note, or is known
			a.note(line, hintOfAPIM(name))
		}
	}
}

// containers are elements whose children are policies.
var containers = []string{"policies", "inbound", "backend", "outbound", "on-error", "choose", "when", "otherwise", "retry"}

// quotaPeriods and renewalPeriods are the units of limits here.
var (
	quotaPeriods   = map[string]string{"Hourly": "hour", "Daily": "day", "Monthly": "month"}
	renewalPeriods = map[string]string{"1": "second", "60": "minute", "3600": "hour", "86400": "day", "2592000": "month"}
)

// addLimit adds a limit of each caller.
func (a *apim) addLimit(line int, policy, counted, amount, unit string) {
	n, err := strconv.ParseInt(amount, 10, 64)
	switch {
	case amount == "":
	case err != nil || n < 1 || n > maxLimit:
		a.note(line, policy+": expected a whole number as limit")
	case unit == "":
		a.note(line, policy+": a limit is one of a second, a minute, an hour, a day or a month")
	case slices.ContainsFunc(a.policy.limits, func(l apimLimit) bool { return l.counted == counted && l.unit == unit }):
		a.note(line, policy+": there is a limit for the same unit already, which stays")
	default:
		a.policy.limits = append(a.policy.limits, apimLimit{counted, strconv.FormatInt(n, 10), unit})
	}
}

// readCounterKey adds a note if a limit is not one of each subscription.
func (a *apim) readCounterKey(policy, key string, line int) {
	if key != "" && !strings.Contains(key, "context.Subscription") {
		a.note(line, policy+": counter-key: a limit is one of each client key")
	}
}

// readBackendService reads which backend a policy names.
func (a *apim) readBackendService(id, base string, line int) {
	chosen := apimMember{line: line, name: id, url: base}
	switch current := &a.policy.backend; {
	case strings.HasPrefix(id+base, "@"): // it is chosen from a list
	case id+base == "":
		a.note(line, "set-backend-service: it names no backend by backend-id or base-url")
	case current.name+current.url == "":
		*current = chosen
	case current.name != id || current.url != base:
		a.note(line, "set-backend-service: a second backend, "+shown(id)+", is not imported; write a site or a route with its own openai_lb")
	}
}

// checkHeader drops the last header if it does not carry over.
func (a *apim) checkHeader(open []string) {
	p := &a.policy
	h := p.headers[len(p.headers)-1]
	drop := true
	switch expression := strings.HasPrefix(h.value, "@"); {
	case slices.Contains(open, "outbound"), slices.Contains(open, "on-error"):
		a.note(h.line, "set-header: a header of replies is set by Caddy's header before openai_lb")
	case h.removed && isCredential(h.name): // that of a client never passes
	case expression && p.identity && strings.EqualFold(h.name, "Authorization"): // the token of the identity
	case expression:
		a.note(h.line, "set-header: the value of "+shown(h.name)+" is an expression")
	default:
		drop = false
	}
	if drop {
		p.headers = p.headers[:len(p.headers)-1]
	}
}

var (
	newObject = regexp.MustCompile(`new\s+JObject\b`)
	// property matches { "url", "https://contoso.openai.azure.com" } and {
	// "priority", 1 }.
	property = regexp.MustCompile(`\{\s*"([A-Za-z0-9_-]+)"\s*,\s*(?:"((?:[^"\\]|\\.)*)"|([^{}"]*?))\s*\}`)
)

// readList reads a list of backends in an expression. It is empty if the
// expression makes none.
func (a *apim) readList(expression string, line int) (members []apimMember) {
	if !strings.HasPrefix(expression, "@") {
		return nil
	}
	code := withoutComments(expression)
	starts := newObject.FindAllStringIndex(code, -1)
	for i, start := range starts {
		end := len(code)
		if i+1 < len(starts) {
			end = starts[i+1][0]
		}
		m := apimMember{line: line + strings.Count(code[:start[0]], "\n")}
		for _, match := range property.FindAllStringSubmatch(code[start[1]:end], -1) {
			switch text, number := match[2], match[3]; match[1] {
			case "url":
				m.url = text
			case "backend-id":
				m.name = text
			case "priority":
				if n, err := strconv.Atoi(number); err == nil && n >= 0 && n <= 1_000_000 {
					m.priority = n
				} else {
					a.note(m.line, "the priority is not a whole number")
				}
			case "weight":
				if n, err := strconv.Atoi(number); err == nil && n >= 0 && n <= backend.MaxWeight {
					m.weight = strconv.Itoa(n)
				} else {
					a.note(m.line, "the weight is not a whole number")
				}
			case "key", "api-key", "apiKey":
				m.key = text
			case "isThrottling", "retryAfter":
			default:
				a.note(m.line, hintOfAPIM(match[1]))
			}
		}
		if m.url+m.name != "" {
			members = append(members, m)
		}
	}
	return members
}
