package tools

import (
	"bytes"
	"cmp"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/cli"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// apim reads backends, pools and policies of Azure API Management:
// https://learn.microsoft.com/azure/templates/microsoft.apimanagement/service/backends
// https://learn.microsoft.com/azure/api-management/api-management-policies
type apim struct {
	*site
	// backends are those with a URL, and pools those that name backends.
	backends []*apimBackend
	pools    []apimPool
	policy   apimPolicy
	// trips are the durations of the circuit breakers of imported backends, in
	// seconds.
	trips []float64
}

// apimBackend is a backend of API Management, so far without its rank in a
// pool.
type apimBackend struct {
	block
	trips []float64
	// notes are about the backend. They are shown if it is imported.
	notes []string
}

// apimPool is a pool of backends.
type apimPool struct {
	name    string
	members []apimMember
	notes   []string
}

// apimMember is a backend of a pool, or of the list in a policy: one by its
// name, or one by its URL.
type apimMember struct {
	line      int
	name, url string
	key       string
	priority  int
	weight    string
}

// File is a file to import.
type File struct {
	Name string
	Text []byte
}

// APIM makes a Caddyfile of files of Azure API Management. Each is JSON with
// backends, or a policy. With several pools, one is named.
func APIM(pool string, files ...File) (string, error) {
	a := &apim{site: newSite("API Management", ":8080"), policy: apimPolicy{retries: -1}}
	for _, file := range files {
		text := bytes.TrimPrefix(file.Text, []byte("\ufeff"))
		read := a.readJSON
		if bytes.HasPrefix(bytes.TrimSpace(text), []byte("<")) {
			read = a.readPolicy
		}
		if err := read(text); err != nil {
			return "", fmt.Errorf("%s: %w", cli.Printable(file.Name), err)
		}
	}
	members, err := a.members(pool)
	if err != nil {
		return "", err
	}
	for _, m := range members {
		a.add(m)
	}
	if len(a.blocks) == 0 {
		return "", fmt.Errorf("no backend can be imported\n%s", strings.Join(a.mergedNotes(), "\n"))
	}
	a.rank()
	a.setOptions()
	return a.caddyfile(), nil
}

// members returns the backends that serve requests: those in the list of the
// policy, those of the one pool, or all.
func (a *apim) members(pool string) ([]apimMember, error) {
	if pool == "" && len(a.policy.listed) > 0 {
		return a.policy.listed, nil
	}
	name := cmp.Or(pool, a.policy.backend.name)
	var names []string
	for _, p := range a.pools {
		names = append(names, shown(p.name))
		if strings.EqualFold(p.name, name) || name == "" && len(a.pools) == 1 {
			for _, text := range p.notes {
				a.note(0, text)
			}
			return p.members, nil
		}
	}
	switch {
	case pool != "" && len(names) == 0:
		return nil, fmt.Errorf("there is no pool %s: the files have none", shown(pool))
	case pool != "":
		return nil, fmt.Errorf("there is no pool %s: expected one of %s", shown(pool), strings.Join(names, ", "))
	case a.backend(name) != nil || a.policy.backend.url != "":
		return []apimMember{a.policy.backend}, nil
	case name != "":
		return nil, fmt.Errorf("the policy names the backend %s, which is not in the files: add the JSON of 'az rest' with the backends",
			shown(name))
	case len(names) > 0:
		return nil, fmt.Errorf("there are several pools: name one of %s with --pool, or add the policy that uses one",
			strings.Join(names, ", "))
	case len(a.backends) == 0:
		return nil, fmt.Errorf("expected a backend of API Management, or a policy with a list of backends")
	}
	a.note(0, "there is no pool, so each backend has the same priority")
	var all []apimMember
	for _, b := range a.backends {
		all = append(all, apimMember{name: b.name})
	}
	return all, nil
}

// backend returns the backend of a name. API Management does not tell upper
// case from lower case.
func (a *apim) backend(name string) *apimBackend {
	for _, b := range a.backends {
		if strings.EqualFold(b.name, name) {
			return b
		}
	}
	return nil
}

// add adds the backend of a member.
func (a *apim) add(m apimMember) {
	b := apimBackend{block: block{url: m.url}}
	if m.url == "" {
		known := a.backend(m.name)
		if known == nil {
			a.note(m.line, "the backend "+shown(m.name)+" is not in the files")
			return
		}
		b = *known
		b.comments = slices.Clone(b.comments)
	}
	base, err := a.baseURL(&b.block)
	if err != nil {
		a.note(m.line, fmt.Sprintf("the backend %s: %v", shown(cmp.Or(b.name, m.name, "of the list")), err))
		return
	}
	for _, text := range b.notes {
		a.note(0, text)
	}
	if _, ok := directive.Word(b.name); b.name != "" &&
		(!ok || slices.ContainsFunc(a.blocks, func(other *block) bool { return other.name == b.name })) {
		b.name = ""
	}
	b.url, b.priority, b.weight = base, m.priority, m.weight
	if m.key != "" {
		a.setKey(&b.block, m.key, m.line)
	}
	a.trips = append(a.trips, b.trips...)
	a.authenticate(&b.block)
	a.blocks = append(a.blocks, &b.block)
}

// baseURL returns the URL of a backend as it is written here.
func (a *apim) baseURL(b *block) (string, error) {
	if placeholder := a.placeholderOf(b.url); placeholder != "" {
		return placeholder, nil
	}
	if strings.ContainsAny(b.url, "{}[]@") {
		placeholder := a.literal(b.url, cmp.Or(safeName(b.name), "BACKEND")+"_URL")
		b.comments = append(b.comments, "The URL was an expression: set the variable.")
		return placeholder, nil
	}
	u, err := url.Parse(strings.TrimRight(b.url, "/"))
	if err == nil && openaiapi.IsAzure(u.Hostname()) {
		withoutAPI(u)
		b.url = u.String()
	}
	if u, err = openaiapi.ParseBaseURL(strings.TrimRight(b.url, "/")); err != nil {
		return "", err
	}
	if _, ok := directive.Word(u.String()); !ok {
		return "", fmt.Errorf("a URL must not contain control characters, braces or backslashes")
	}
	return u.String(), nil
}

// setKey sets the key that a backend gets in the header api-key.
func (a *apim) setKey(b *block, key string, line int) {
	if b.key = a.placeholderOf(key); b.key == "" {
		b.key = a.literal(key, keyNameOf(b))
		b.comments = append(b.comments, setVariable("The key", line))
	}
	if u, err := url.Parse(b.url); err != nil || !openaiapi.IsAzure(u.Hostname()) {
		b.auth = keys.SchemeAPIKey
	}
}

// keyNameOf names the variable for the key of a backend. It has nothing of a
// URL that cannot be read.
func keyNameOf(b *block) string {
	if u, err := url.Parse(b.url); err == nil && u.Hostname() != "" {
		return keyName(b.url)
	}
	return cmp.Or(safeName(b.name), "BACKEND") + "_KEY"
}

// setIdentity makes a backend use an identity of Azure, whose client ID may be
// empty.
func (a *apim) setIdentity(b *block, clientID string) {
	if keys.CheckScheme(keys.SchemeAzureIdentity) != nil {
		b.key = a.literal("identity of "+b.url, keyNameOf(b))
		b.comments = append(b.comments, "API Management used a managed identity: for that, build with the module azure, and write auth azure_identity instead of the key.")
		return
	}
	b.auth, b.authOptions = keys.SchemeAzureIdentity, [][2]string{{"credential", "managed_identity"}}
	if placeholder := a.placeholderOf(clientID); placeholder != "" {
		clientID = placeholder
	} else if _, ok := directive.Word(clientID); !ok {
		clientID = ""
	}
	if clientID != "" {
		b.authOptions = append(b.authOptions, [2]string{"client_id", clientID})
	}
}

// authenticate gives a backend the credential of the policy, if the backend has
// none of its own.
func (a *apim) authenticate(b *block) {
	for _, h := range a.policy.headers {
		switch hasOwn := b.key != "" || b.auth != ""; {
		case h.removed:
			a.removeHeader(b, h)
		case hasOwn && isCredential(h.name):
		case strings.EqualFold(h.name, "api-key"):
			a.setKey(b, h.value, h.line)
		case strings.EqualFold(h.name, "Authorization"):
			a.setBearer(b, h.value, h.line)
		default:
			a.addHeader(b, h.name, h.value, a.placeholderOf(h.value), h.line)
		}
	}
	switch {
	case b.key != "" || b.auth != "":
	case a.policy.identity:
		a.setIdentity(b, a.policy.clientID)
	default:
		a.setKey(b, "no key of "+b.url, 0)
		b.comments = []string{"No credential was in the files: set the variable, or write auth azure_identity instead."}
	}
}

// removeHeader removes a header, unless the backend sets it.
func (a *apim) removeHeader(b *block, h apimHeader) {
	isSet := func(other [2]string) bool { return strings.EqualFold(strings.TrimPrefix(other[0], "-"), h.name) }
	if err := backend.CheckRemoved(h.name); err != nil || strings.HasPrefix(h.name, "-") ||
		slices.ContainsFunc(b.header, isSet) {
		a.note(h.line, "set-header: the header "+shown(h.name)+" cannot be removed by the option header")
		return
	}
	b.header = append(b.header, [2]string{"-" + h.name})
}

func isCredential(header string) bool {
	return strings.EqualFold(header, "api-key") || strings.EqualFold(header, "Authorization")
}

// setBearer sets the key of a value of Authorization.
func (a *apim) setBearer(b *block, value string, line int) {
	scheme, token, _ := strings.Cut(strings.TrimSpace(value), " ")
	if !strings.EqualFold(scheme, "Bearer") || strings.TrimSpace(token) == "" {
		a.note(line, "only the scheme Bearer of the header Authorization carries over")
		return
	}
	a.setKey(b, strings.TrimSpace(token), line)
	b.auth = keys.SchemeBearer
}

// rank makes the lowest priority 1 or more. A member without a priority has 0.
func (a *apim) rank() {
	lowest := slices.MinFunc(a.blocks, func(x, y *block) int { return cmp.Compare(x.priority, y.priority) }).priority
	highest := slices.MaxFunc(a.blocks, func(x, y *block) int { return cmp.Compare(x.priority, y.priority) }).priority
	for _, b := range a.blocks {
		switch {
		case lowest == highest:
			b.priority = 0
		case lowest < 1:
			b.priority += 1 - lowest
		}
	}
}

// longestTrip is the longest duration of a circuit breaker that carries over,
// in seconds: a failure makes a backend a suspect, which need not be kept out
// for an hour.
const shortestTrip, longestTrip = 0.05, 300

// setOptions writes the options of the balancer.
func (a *apim) setOptions() {
	if a.policy.retries >= 0 && a.policy.retries < len(a.blocks)-1 {
		a.option("lb_retries", strconv.Itoa(a.policy.retries))
	}
	if len(a.trips) > 0 {
		trip := slices.Min(a.trips)
		if slices.Max(a.trips) != trip {
			a.note(0, "tripDuration: fail_duration is that of all backends, so it is the shortest")
		}
		if limited := min(max(trip, shortestTrip), longestTrip); limited != trip {
			a.note(0, fmt.Sprintf("tripDuration: a suspect is kept out for %s s instead", decimal(limited)))
			trip = limited
		}
		a.option("fail_duration", decimal(trip)+"s")
	}
	if a.policy.timeout != "" {
		a.option("response_header_timeout", a.policy.timeout)
	}
	a.note(0, "subscriptions: write a client_key for each one, or a client_keys_file; clients may keep the header that the key is in")
	a.options = append(a.options, "# The key of a subscription, of 16 characters or more.")
	a.option("client_key", "apim", a.literal("a subscription", "APIM_SUBSCRIPTION_KEY"))
	if len(a.policy.limits) > 0 {
		a.options = append(a.options, "caller * {")
		for _, l := range a.policy.limits {
			a.options = append(a.options, "\t"+directive.Line(l.counted, l.amount+"/"+l.unit))
		}
		a.options = append(a.options, "}")
	}
}

var (
	namedValue    = regexp.MustCompile(`^\{\{\s*([A-Za-z0-9_.-]+)\s*\}\}$`)
	armExpression = regexp.MustCompile(`^\[[^\[].*\]$`)
	armLiteral    = regexp.MustCompile(`'([^']*)'`)
)

// placeholderOf returns the placeholder of a text that is a named value, or an
// expression of a template. It is empty for any other text.
func (a *apim) placeholderOf(text string) string {
	text = strings.TrimSpace(text)
	if match := namedValue.FindStringSubmatch(text); match != nil {
		return a.literal("{{"+match[1]+"}}", cmp.Or(safeName(match[1]), "VALUE"))
	}
	if name := lastLiteral(text); name != "" {
		return a.literal(text, cmp.Or(safeName(name), "VALUE"))
	}
	return ""
}

// lastLiteral returns the last literal of an expression of a template, such as
// the name of a parameter or of a resource. It is empty if the text is no
// expression, or has no literal.
func lastLiteral(text string) string {
	if !armExpression.MatchString(text) {
		return ""
	}
	all := armLiteral.FindAllStringSubmatch(text, -1)
	if len(all) == 0 {
		return ""
	}
	return all[len(all)-1][1]
}

var camelCase = regexp.MustCompile(`([a-z0-9])([A-Z])`)

// safeName makes the name of a variable. It is empty if nothing of the text may
// be in one.
func safeName(text string) string {
	name := variableName(camelCase.ReplaceAllString(text, "${1}_$2"))
	if name != "" && name[0] <= '9' {
		name = "VALUE_" + name
	}
	return name
}

// lineAt returns the line of an offset in a text.
func lineAt(text []byte, offset int64) int {
	return 1 + bytes.Count(text[:min(max(offset, 0), int64(len(text)))], []byte("\n"))
}
