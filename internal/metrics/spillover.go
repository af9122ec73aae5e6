package metrics

import (
	"net/http"
	"slices"
)

// Azure's headers of a reply that another deployment gave, because the
// provisioned one that was asked could not: its name, and the status with which
// it refused.
const (
	spilledFrom  = "X-Ms-Spillover-From-Deployment"
	spilledError = "X-Ms-Spillover-Error"
)

// spillErrors are the statuses after which Azure has another deployment reply.
var spillErrors = []string{"", "400", "429", "500", "503"}

// spill has the labels of a reply by spillover. The status is that in the
// header.
type spill struct{ deployment, status, result string }

// Spilled counts a reply that another deployment of the same account gave, by
// Azure's spillover.
func (b *Backend) Spilled(deployment string, res *http.Response) {
	if res.Header[spilledFrom] == nil {
		return
	}
	of := spill{deployment, res.Header.Get(spilledError), "served"}
	if !slices.Contains(spillErrors, of.status) {
		of.status = Other
	}
	if res.StatusCode >= 300 {
		of.result = "failed"
	}
	b.spilled.of(of).Inc()
}
