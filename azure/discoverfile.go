package azure

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	backends "github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
)

// site writes a Caddyfile with a backend for each deployment, as `caddy fmt`
// does. auth are the lines of the backends about their credential.
func site(from string, accounts []*account, auth []string) string {
	usable, notes := sorted(accounts)
	var out strings.Builder
	p := func(indent int, text string) { out.WriteString(strings.Repeat("\t", indent) + text + "\n") }
	p(0, directive.Comment("Made by caddy openai-lb discover of "+from+"."))
	p(0, "# Clients name the model, and each deployment of it may serve them. Deployments with provisioned throughput are first,")
	p(0, "# and the others share the rest by their capacity. Add a client_key for each caller: without one, anyone who can")
	p(0, "# reach this address can spend your budget.")
	if len(notes) > 0 {
		p(0, "#")
		p(0, "# Not here:")
	}
	for _, note := range notes {
		p(0, directive.Comment("- "+note))
	}
	out.WriteString("\n")
	p(0, ":8080 {")
	p(1, "openai_lb {")
	names := make(map[string]bool)
	for _, d := range usable {
		p(2, directive.Comment(d.comment()))
		p(2, directive.Line("backend", "https://"+d.account.host())+" {")
		p(3, directive.Line("name", uniqueName(names, d.account.Name+"-"+d.Name)))
		p(3, "priority "+strconv.Itoa(d.priority()))
		if weight := d.weightAmong(usable); weight > 1 {
			p(3, "weight "+strconv.Itoa(weight))
		}
		for _, line := range auth {
			p(3, line)
		}
		p(3, directive.Line(slices.Compact([]string{"model", d.Properties.Model.Name, d.Name})...))
		p(2, "}")
	}
	p(1, "}")
	p(0, "}")
	return out.String()
}

// sorted returns the deployments of all accounts that a backend can have, those
// with provisioned throughput first, and says why the others are left out.
func sorted(accounts []*account) (usable []*deployment, notes []string) {
	for _, account := range accounts {
		if len(account.deployments) == 0 {
			notes = append(notes, account.Name+" has no deployments")
		}
		for _, d := range account.deployments {
			if reason := cmp.Or(d.unusable(), d.unwritable()); reason != "" {
				notes = append(notes, d.String()+": "+reason)
				continue
			}
			usable = append(usable, d)
		}
	}
	slices.SortStableFunc(usable, func(a, b *deployment) int {
		return cmp.Or(cmp.Compare(a.priority(), b.priority()),
			cmp.Compare(a.Properties.Model.Name, b.Properties.Model.Name))
	})
	return usable, notes
}

// unwritable returns why no line of a Caddyfile can name the deployment, if
// none can.
func (d *deployment) unwritable() string {
	host := d.account.host()
	if host == "" {
		return "its account has no custom subdomain, and a regional address accepts no tokens"
	}
	for what, text := range map[string]string{
		"host": host, "deployment's name": d.Name, "account's name": d.account.Name, "model's name": d.Properties.Model.Name,
	} {
		if _, ok := directive.Word(text); !ok || strings.Contains(text, "*") {
			return "its " + what + " has characters that a Caddyfile cannot have"
		}
	}
	return ""
}

func (d *deployment) priority() int {
	if d.provisioned() {
		return 1
	}
	return 2
}

// weightAmong returns the deployment's share among those of its model and
// priority, by capacity.
func (d *deployment) weightAmong(all []*deployment) int {
	divisor, largest := 0, 1
	for _, other := range all {
		if other.priority() == d.priority() && other.Properties.Model.Name == d.Properties.Model.Name {
			divisor, largest = gcd(max(other.SKU.Capacity, 1), divisor), max(largest, other.SKU.Capacity)
		}
	}
	if largest/divisor > backends.MaxWeight {
		divisor = largest/backends.MaxWeight + 1
	}
	return max(max(d.SKU.Capacity, 1)/divisor, 1)
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// uniqueName returns a name for a backend that no other one has.
func uniqueName(names map[string]bool, name string) string {
	unique := name
	for n := 2; names[unique]; n++ {
		unique = name + "-" + strconv.Itoa(n)
	}
	names[unique] = true
	return unique
}

// comment describes the deployment: model, SKU, capacity, limits, and when the
// model retires.
func (d *deployment) comment() string {
	m := d.Properties.Model
	parts := []string{strings.TrimSpace(m.Name + " " + m.Version), d.SKU.Name}
	switch {
	case d.provisioned():
		parts = append(parts, fmt.Sprintf("%d units", d.SKU.Capacity))
	case d.SKU.Capacity > 0:
		parts = append(parts, fmt.Sprintf("capacity %d", d.SKU.Capacity))
	}
	for _, limit := range d.Properties.RateLimits {
		parts = append(parts, limit.String())
	}
	parts = append(parts, d.account.Location)
	if !d.retires.IsZero() {
		parts = append(parts, "retires on "+d.retires.Format(time.DateOnly))
	}
	return strings.Join(slices.DeleteFunc(parts, func(part string) bool { return part == "" }), ", ")
}

func (l rateLimit) String() string {
	return fmt.Sprintf("%s %ss in %s s", decimal(l.Count), l.Key, decimal(l.RenewalPeriod))
}

func decimal(n float64) string { return strconv.FormatFloat(n, 'f', -1, 64) }
