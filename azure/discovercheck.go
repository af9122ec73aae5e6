package azure

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/modules/tools"
)

// standIn begins what stands for a variable that is not set.
const standIn = "stand-in-"

// pooled is a backend of a Caddyfile.
type pooled struct{ tools.Configured }

func (b pooled) String() string {
	return printable(fmt.Sprintf("backend '%s' of pool '%s'", b.Name, b.Pool))
}

// differences compares the backends of a Caddyfile with the deployments that
// there are, and returns what somebody has to act on. Backends elsewhere than
// at Azure are left out.
func differences(backends []tools.Configured, accounts []*account, now time.Time) (found []string, err error) {
	served := make(map[*deployment]bool)
	for _, configured := range backends {
		b := pooled{configured}
		if slices.ContainsFunc(append(slices.Clone(b.Models), b.Host),
			func(name string) bool { return strings.Contains(name, standIn) }) {
			return nil, fmt.Errorf("%s: its url or a model has a variable or a file that is not set here", b)
		}
		i := slices.IndexFunc(accounts, func(a *account) bool { return a.has(b.Host) })
		switch {
		case i >= 0:
			found = append(found, b.differences(accounts[i], served)...)
		case openaiapi.IsAzure(b.Host):
			found = append(found, fmt.Sprintf("%s: no account has the host %s", b, b.Host))
		}
	}
	for _, account := range accounts {
		for _, d := range account.deployments {
			if d.unusable() != "" {
				continue
			}
			if !served[d] {
				found = append(found, fmt.Sprintf("deployment %s: no backend serves it", d))
			}
			if date := d.retires.Format(time.DateOnly); d.retires.Before(now) && !d.retires.IsZero() {
				found = append(found, fmt.Sprintf("deployment %s: its model retired on %s", d, date))
			} else if (openaiapi.ListedModel{Shutdown: d.retires}).EndsSoon(now) {
				found = append(found, fmt.Sprintf("deployment %s: its model retires on %s", d, date))
			}
		}
	}
	return found, nil
}

// differences records which deployments of its account the backend serves. A
// backend without models serves all.
func (b pooled) differences(account *account, served map[*deployment]bool) (found []string) {
	for _, d := range account.deployments {
		if len(b.Models) == 0 {
			served[d] = true
		}
	}
	for _, name := range b.Models {
		i := slices.IndexFunc(account.deployments, func(d *deployment) bool { return strings.EqualFold(d.Name, name) })
		if i < 0 {
			found = append(found,
				printable(fmt.Sprintf("%s: the account %s has no deployment '%s'", b, account.Name, name)))
			continue
		}
		if reason := account.deployments[i].unusable(); reason != "" {
			found = append(found, printable(fmt.Sprintf("%s: the deployment '%s' cannot serve: %s", b, name, reason)))
		}
		served[account.deployments[i]] = true
	}
	return found
}
