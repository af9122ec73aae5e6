package metrics

import (
	"net/http"
	"slices"
)

// Azure's headers in a reply by spillover: another deployment has replied,
// because the requested provisioned one could not. They contain the name of the
// requested deployment, and the status with which it refused.
const (
	spilledFrom  = "X-Ms-Spillover-From-Deployment"
	spilledError = "X-Ms-Spillover-Error"
)

// spillErrors are the statuses after which Azure sends a request to another
// deployment.
var spillErrors = []string{"", "400", "429", "500", "503"}

// spill has the labels of a reply by spillover. status is the one in the
// header.
type spill struct{ deployment, status, result string }

// Spilled counts a reply that came from another deployment of the same account
// by Azure's spillover. It ignores other replies.
func (b *Backend) Spilled(deployment string, res *http.Response) {
	if res.Header[spilledFrom] == nil {
		return
	}
	labels := spill{deployment, res.Header.Get(spilledError), "served"}
	if !slices.Contains(spillErrors, labels.status) {
		labels.status = Other
	}
	if res.StatusCode >= 300 {
		labels.result = "failed"
	}
	b.spilled.getOrAdd(labels).Inc()
}
