package tools

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/cli"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

const (
	// atOnce is how many requests of a check run at a time.
	atOnce = 64
	// maxBody is how much of a reply is read.
	maxBody = openaiapi.MaxModelList
	// soon is how long before its end a certificate is reported.
	soon = 14 * 24 * time.Hour
	// maxError is how much of an error is shown.
	maxError = 256
	// classicVersion is the api-version of Azure's classic paths, for gateways
	// that have only those.
	classicVersion = "api-version=2024-10-21"
)

// CheckStatus is the result of a check for a backend, and how severe a problem
// is.
type CheckStatus string

// The statuses of a backend. One with a warning can serve.
const (
	CheckOK      CheckStatus = "ok"
	CheckWarning CheckStatus = "warning"
	CheckFailed  CheckStatus = "failed"
)

// Checked is the result of the check of a backend.
type Checked struct {
	Pool    string      `json:"pool"`
	Backend string      `json:"backend"`
	Status  CheckStatus `json:"status"`
	// Address is the host and port of its URL, and IP where the connection
	// went.
	Address string `json:"address"`
	IP      string `json:"ip,omitempty"`
	// CertificateUntil is when its certificate expires. It is nil without TLS.
	CertificateUntil *time.Time `json:"certificate_until,omitempty"`
	// Credential is accepted, refused, missing, none, caller's or unknown.
	Credential string `json:"credential"`
	// Models are those that its options name.
	Models []CheckedModel `json:"models"`
	// Listed is how many models it lists. It is nil if it lists none.
	Listed *int `json:"listed,omitempty"`
	// Milliseconds are the times of the first request by their parts.
	Milliseconds map[string]int64 `json:"milliseconds"`
	// Remaining are the requests and tokens that its rate limit leaves, as the
	// backend reports them.
	Remaining map[string]int64 `json:"remaining"`
	Problems  []CheckedProblem `json:"problems"`
}

// CheckedModel is a model of a backend, by the backend's name for it.
type CheckedModel struct {
	Name string `json:"name"`
	// State is found or missing in the list of models, served or refused by a
	// request to it, or unknown.
	State string `json:"state"`
}

// The states of a model.
const (
	found   = "found"
	missing = "missing"
	served  = "served"
	refused = "refused"
	unknown = "unknown"
)

// CheckedProblem is a reason for a status.
type CheckedProblem struct {
	Status CheckStatus `json:"status"`
	Text   string      `json:"text"`
}

// checker checks backends.
type checker struct {
	timeout time.Duration
	spend   bool
	slots   chan struct{}
}

// check checks all backends of the pools at the same time.
func (c *checker) check(ctx context.Context, entries []*pools.Entry) []*Checked {
	c.slots = make(chan struct{}, atOnce)
	var all []*Checked
	var checks []*backendCheck
	var wait sync.WaitGroup
	for _, e := range entries {
		rechecker := e.Rechecker.(*backend.Rechecker)
		for _, b := range rechecker.Backends {
			o := &backendCheck{checker: c, Backend: b, transport: rechecker.Transport, Checked: Checked{
				Pool: e.Name, Backend: b.Name, Status: CheckOK, Address: b.Dial(), Credential: credentialOf(b),
				Models: []CheckedModel{}, Milliseconds: map[string]int64{}, Remaining: map[string]int64{},
				Problems: []CheckedProblem{},
			}}
			all, checks = append(all, &o.Checked), append(checks, o)
			wait.Go(func() { o.check(ctx) })
		}
	}
	wait.Wait()
	warnOfSharedKeys(checks)
	return all
}

// warnOfSharedKeys warns of each backend with the key of one at another host of
// OpenAI. These hosts stand for regions in which data stays, as
// eu.api.openai.com does. A project, to which a key belongs, has its data in
// one region, and its limits once.
func warnOfSharedKeys(checks []*backendCheck) {
	type projectKey struct{ pool, digest string }
	first := make(map[projectKey]*backendCheck)
	for _, o := range checks {
		key, host := o.Key(), o.Origin.Hostname()
		if key == nil || !strings.HasSuffix("."+host, ".openai.com") {
			continue
		}
		k := projectKey{o.Checked.Pool, key.Digest()}
		switch other := first[k]; {
		case other == nil:
			first[k] = o
		case other.Origin.Hostname() != host:
			o.problem(CheckWarning, "has the same key as %s at another host of OpenAI, so both may have one limit together: "+
				"use a key of another project", other.Name)
		}
	}
}

// credentialOf returns which credential a backend gets, until it has answered.
func credentialOf(b *backend.Backend) string {
	switch {
	case b.Credentials.Passthrough:
		return "caller's"
	case !b.HasCredential():
		return "none"
	}
	return unknown
}

// backendCheck is the check of one backend.
type backendCheck struct {
	*checker
	*backend.Backend
	transport http.RoundTripper
	Checked   Checked
}

// problem records a problem, once. The status becomes the worst of all.
func (o *backendCheck) problem(status CheckStatus, format string, args ...any) {
	p := CheckedProblem{status, cli.Printable(fmt.Sprintf(format, args...))}
	if slices.Contains(o.Checked.Problems, p) {
		return
	}
	o.Checked.Problems = append(o.Checked.Problems, p)
	if status == CheckFailed || o.Checked.Status == CheckOK {
		o.Checked.Status = status
	}
}

// check asks the backend for its models, and then for each model that its
// options name.
func (o *backendCheck) check(ctx context.Context) {
	names := o.Names()
	o.Checked.Models = make([]CheckedModel, len(names))
	for i, name := range names {
		o.Checked.Models[i] = CheckedModel{name, unknown}
	}
	a := o.listModels(ctx)
	o.Checked.Milliseconds, o.Checked.IP = a.times, a.ip
	o.readCertificate(a)
	if a.err != nil {
		o.failed(a)
		return
	}
	o.readRemaining(a.header)
	if !o.readList(a) {
		return
	}
	if o.spend || o.Azure {
		o.askModels(ctx)
	}
	if o.spend && len(names) == 0 {
		o.problem(CheckWarning, "the options name no model: no request was sent to one")
	}
	o.judgeModels()
}

// readCertificate records until when the certificate is valid.
func (o *backendCheck) readCertificate(a backendReply) {
	var certificates []*x509.Certificate
	if a.tls != nil {
		certificates = a.tls.PeerCertificates
	} else if unverified, ok := errors.AsType[*tls.CertificateVerificationError](a.err); ok {
		certificates = unverified.UnverifiedCertificates
	}
	if len(certificates) == 0 {
		return
	}
	until := certificates[0].NotAfter
	o.Checked.CertificateUntil = &until
	switch left := time.Until(until); {
	case left <= 0 && a.tls == nil:
		o.problem(CheckFailed, "the certificate expired on %s", until.UTC().Format(time.DateOnly))
	case left <= 0:
		o.problem(CheckWarning, "the certificate expired on %s, but is not verified", until.UTC().Format(time.DateOnly))
	case left < soon:
		o.problem(CheckWarning, "the certificate expires on %s", until.UTC().Format(time.DateOnly))
	}
}

// failed records why there is no reply.
func (o *backendCheck) failed(a backendReply) {
	text := pool.CutText(cli.Printable(a.secrets.Text(a.err.Error())), maxError)
	if a.credential {
		o.Checked.Credential = missing
		o.problem(CheckFailed, "there is no credential: %s", text)
		return
	}
	op, _ := errors.AsType[*net.OpError](a.err)
	switch cause := verdict.CauseOf(a.err); {
	case op != nil && op.Op == "proxyconnect":
		o.problem(CheckFailed, "the proxy cannot be reached, see HTTPS_PROXY: %s", text)
	case cause == "dns", a.step == "resolve":
		o.problem(CheckFailed, "the host %s could not be resolved: %s", o.Origin.Hostname(), text)
	case cause == "refused":
		o.problem(CheckFailed, "%s refuses connections", o.Checked.Address)
	case cause == "timeout" && a.step != "tls" && a.step != "reply":
		o.problem(CheckFailed, "no connection in time: is the address right, and does the network let it through?")
	case cause == "timeout" && a.step == "tls":
		o.problem(CheckFailed, "%s accepts connections, but did not answer the TLS handshake within %s",
			o.Checked.Address, o.timeout)
	case cause == "timeout":
		o.problem(CheckFailed, "no reply within %s", o.timeout)
	case strings.Contains(text, "server gave HTTP response to HTTPS client"), strings.Contains(text, "first record does not look like a TLS handshake"):
		o.problem(CheckFailed, "%s does not speak TLS: use http:// or another port", o.Checked.Address)
	case cause == "certificate" && slices.ContainsFunc(o.Checked.Problems,
		func(p CheckedProblem) bool { return p.Status == CheckFailed }):
		// it has expired
	case cause == "certificate":
		o.problem(CheckFailed, "the certificate is not trusted: %s", text)
	default:
		o.problem(CheckFailed, "no reply: %s", text)
	}
}

// readRemaining records what a rate limit leaves: the least of all replies.
func (o *backendCheck) readRemaining(header http.Header) {
	rates := verdict.ReadRates(header)
	for name, rate := range map[string]verdict.Rate{"requests": rates.Requests, "tokens": rates.Tokens} {
		if n, ok := rate.Remaining.Number(); ok {
			if least, known := o.Checked.Remaining[name]; !known || int64(n) < least {
				o.Checked.Remaining[name] = int64(n)
			}
		}
	}
}

// refusalText describes an error of the backend by its status and its code. Its
// message may contain a key.
func refusalText(a backendReply) string {
	text := fmt.Sprintf("status %d", a.status)
	if code := verdict.Code(a.body); code != "" && code != strconv.Itoa(a.status) && !a.secrets.In(code) {
		text += " (" + code + ")"
	}
	return text
}

// judge records what a reply means for the whole backend. It reports whether
// there is more to find out.
func (o *backendCheck) judge(a backendReply) (class verdict.Class, more bool) {
	class = a.class()
	switch class {
	case verdict.Credential:
		switch {
		case o.Credentials.Passthrough:
		case o.HasCredential():
			o.Checked.Credential = refused
			if a.status == http.StatusForbidden { // Azure says the same of a network that its rules do not admit
				o.problem(CheckFailed, "access is denied to the credential, or from this network: %s", refusalText(a))
			} else {
				o.problem(CheckFailed, "the credential is refused: %s", refusalText(a))
			}
		default:
			o.Checked.Credential = missing
			o.problem(CheckFailed, "a credential is required, and the options have none: %s", refusalText(a))
		}
	case verdict.Quota:
		o.problem(CheckFailed, "the account has no budget left: %s", refusalText(a))
	case verdict.Throttled:
		o.problem(CheckWarning, "throttled now: %s", refusalText(a))
	case verdict.Failed, verdict.Overloaded:
		o.problem(CheckFailed, "the backend fails: %s", refusalText(a))
	default:
		return class, true
	}
	return class, false
}

// accepted records that the backend knows the credential.
func (o *backendCheck) accepted() {
	if o.Checked.Credential == unknown {
		o.Checked.Credential = "accepted"
	}
}
