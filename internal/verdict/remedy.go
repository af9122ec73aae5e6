package verdict

// Remedy describes how a problem with a backend ends: on its own, because the
// backend is retried, or after a person has changed something. [RemedyOf] finds
// it in a table, which is the only source for this. The level of log lines, the
// page, the admin API, metrics and the docs use it.
type Remedy struct {
	Class Class
	// Cause is the word of CauseOf to which the remedy applies. It is empty for
	// all causes of the class that have no own row.
	Cause string
	// Meaning describes the problem in words that follow the name of the
	// backend.
	Meaning string
	// NeedsOperator reports whether the problem lasts until a person changes
	// something.
	NeedsOperator bool
	// Next is the action that a person must take. If the problem needs no
	// person, it says what the balancer does meanwhile.
	Next string
}

// retried is the remedy's text for a backend that has failed.
const retried = "A request tries it again when its cooldown is over."

// rechecked is the remedy's text for a backend that cannot be reached. Package
// pool has the intervals.
const rechecked = "It is tried again after 1, 2, 4 s and so on, and then every 60 s."

// Remedies lists all remedies. For each class, rows for one cause come before
// the row for all other causes.
var Remedies = []Remedy{
	{Credential, "", "refuses its key", true, "Put a valid key in place of it."},
	{NotPermitted, "", "does not permit what its key is used for", true, "Give its key the role or the scope that the request needs."},
	{NoModel, "", "does not have the model", true, "Deploy the model there, or leave it out of the options of the backend."},
	{Quota, "", "has no budget left", true, "Raise the budget of its account, or pay for it."},
	{Unreachable, "certificate", "has a certificate that is not accepted", true, "Renew its certificate, or trust the issuer with tls_trust_pool."},
	{Unreachable, "tls", "does not speak TLS as expected", true, "Correct the scheme and the port of its URL, or the TLS settings on either side."},
	{Unreachable, "dns", "has a host name without an address", true, "Correct the host in its URL, or the DNS zone or resolver."},
	{Unreachable, "malformed", "does not speak HTTP", true, "Correct the host and the port of its URL."},
	{Unreachable, "refused", "refuses connections", false, "See whether it runs. " + rechecked},
	{Unreachable, "unroutable", "has an address without a route", false, "See whether a network or a firewall has changed. " + rechecked},
	{Unreachable, "timeout", "does not accept connections in time", false, "See whether it runs, and whether a firewall lets it through. " + rechecked},
	{Unreachable, "", "cannot be reached", false, rechecked},
	{NoCredential, "", "has no credential to send", false, "A request tries it again when there is one. If that takes long, see the log."},
	{Timeout, "", "did not answer in time", false, retried},
	{Silent, "", "accepts requests and sends nothing", false, "One request tries it after 1, 2, 4, 8 and then every 16 s. If it stays so, see how the provider is."},
	{Overloaded, "", "is overloaded", false, retried},
	{BrokenStream, "", "broke off a stream", false, retried},
	{Throttled, "", "throttles", false, "It has said when it accepts requests again."},
	{Failed, "", "answers with errors", false, retried},
}

// unknownRemedy is the remedy for classes without a row.
var unknownRemedy = Remedy{Meaning: "answers with errors", Next: retried}

// RemedyOf returns the remedy for a problem with a backend.
func RemedyOf(class Class, cause string) Remedy {
	for _, r := range Remedies {
		if r.Class == class && (r.Cause == cause || r.Cause == "") {
			return r
		}
	}
	return unknownRemedy
}
