package verdict

// The classes of problems that are not the class of a reply. In the table,
// those of a backend come first.
const (
	// Unhealthy means that the backend fails active health checks.
	Unhealthy Class = "unhealthy"
	// Slow means that the backend was silent, and now answers, but too late.
	Slow Class = "slow"
	// OverQuota means that a quota of the backend by the day or the month is
	// used up.
	OverQuota Class = "over_quota"
	// Unavailable means that no backend can serve a model, and AllThrottled
	// that all of them throttle.
	Unavailable  Class = "unavailable"
	AllThrottled Class = "all_throttled"
	// NoFirstByte means that requests wait for much longer than usual, and have
	// got no byte.
	NoFirstByte Class = "no_first_byte"
	// NotInTouch means that this replica cannot reach the state engine.
	NotInTouch Class = "not_in_touch"
	// StaleSecret means that a secret could not be reloaded from its file.
	StaleSecret Class = "stale_secret"
	// NotWritten means that changes wait to be written to a disk.
	NotWritten Class = "not_written"
	// ReloadFailed means that Caddy could not load its latest config.
	ReloadFailed Class = "reload_failed"
	// ConfigDiffers means that other replicas have other configs.
	ConfigDiffers Class = "config_differs"
)

// Remedy describes a problem, and how it ends: on its own, because the backend
// is retried, or after a person has changed something. [RemedyOf] finds it in a
// table, which is the only source for this. The level of log lines, the page,
// the admin API, the command, metrics, alerts and the docs use it: if a person
// must act, the line in the log is an error.
type Remedy struct {
	Class Class
	// Cause is the word of CauseOf to which the remedy applies. It is empty for
	// all causes of the class that have no own row.
	Cause string
	// Meaning describes the problem, for a backend in words that follow its
	// name. A detail may follow after a colon.
	Meaning string
	// NeedsOperator reports whether the problem lasts until a person changes
	// something.
	NeedsOperator bool
	// Next is the action that a person must take. If the problem needs no
	// person, it says what the balancer does meanwhile.
	Next string
	// Alert is the alert on the problem. It is empty if there is none on this
	// problem alone.
	Alert string
	// Log is the message of the line that says that the problem has begun.
	Log string
	// Over is the message at the end of a problem that no event reports: it is
	// looked for from time to time. It is empty for all others.
	Over string
}

// retried is the remedy's text for a backend that has failed.
const retried = "A request tries it again when its cooldown is over."

// rechecked is the remedy's text for a backend that cannot be reached. Package
// pool has the intervals.
const rechecked = "It is tried again after 1, 2, 4 s and so on, and then every 60 s."

// The messages at the beginning of most problems of a backend, and of those of
// a disk. Caddy's own lines have no message of a fixed text.
const (
	cooldownLine = "cooldown started"
	diskLine     = "could not …"
	caddyLine    = "Caddy’s error"
)

// Alerts on several problems.
const (
	refusedAlert       = "OpenAILBCredentialRefused"
	misconfiguredAlert = "OpenAILBBackendMisconfigured"
	unreachableAlert   = "OpenAILBBackendUnreachable"
)

// Remedies lists the remedies of the problems of a backend. For each class,
// rows for one cause come before the row for all other causes.
var Remedies = []Remedy{
	{Credential, "", "refuses its key", true, "Replace its key with a valid one.", refusedAlert, cooldownLine, ""},
	{NotPermitted, "", "does not permit what its key is used for", true, "Give its key the role or the scope that the request needs.", refusedAlert, cooldownLine, ""},
	{NoModel, "", "does not have the model", true, "Deploy the model there, or leave it out of the options of the backend.", "OpenAILBModelMissing", cooldownLine, ""},
	{Quota, "", "has no budget left", true, "Raise the budget of its account, or pay for it.", "OpenAILBQuotaUsedUp", cooldownLine, ""},
	{Unreachable, "certificate", "has a certificate that is not accepted", true, "Renew its certificate, or trust the issuer with tls_trust_pool.", misconfiguredAlert, cooldownLine, ""},
	{Unreachable, "tls", "does not speak TLS as expected", true, "Correct the scheme and the port of its URL, or the TLS settings on either side.", misconfiguredAlert, cooldownLine, ""},
	{Unreachable, "dns", "has a host name without an address", true, "Correct the host in its URL, or the DNS zone or resolver.", misconfiguredAlert, cooldownLine, ""},
	{Unreachable, "malformed", "does not speak HTTP", true, "Correct the host and the port of its URL.", misconfiguredAlert, cooldownLine, ""},
	{Unreachable, "refused", "refuses connections", false, "See whether it runs. " + rechecked, unreachableAlert, cooldownLine, ""},
	{Unreachable, "unroutable", "has an address without a route", false, "See whether a network or a firewall has changed. " + rechecked, unreachableAlert, cooldownLine, ""},
	{Unreachable, "timeout", "does not accept connections in time", false, "See whether it runs, and whether a firewall lets it through. " + rechecked, unreachableAlert, cooldownLine, ""},
	{Unreachable, "", "cannot be reached", false, rechecked, unreachableAlert, cooldownLine, ""},
	{NoCredential, "", "has no credential to send", false, "A request tries it again when there is one. If that takes long, see the log.", "OpenAILBNoCredential", cooldownLine, ""},
	{Timeout, "", "did not answer in time", false, retried, "", cooldownLine, ""},
	{Silent, "", "accepts requests and sends nothing", false, "One request tries it after 1, 2, 4, 8 and then every 16 s. If it stays silent, check the status page of the provider.", "OpenAILBBackendSilent", "backend silent", ""},
	{Slow, "", "answers much later than usual", false, "Requests go to other backends first. It ends with a reply in time.", "", "backend slow", ""},
	{Unhealthy, "", "fails health checks", false, "It is checked again at each health_interval. The log has the cause.", "", "backend fails its health checks", ""},
	{OverQuota, "", "has used up its quota", false, "Requests pass it over until there is room again. If that is too long, raise its requests or tokens.", "", "backend over its quota", ""},
	{Overloaded, "", "is overloaded", false, retried, "", cooldownLine, ""},
	{BrokenStream, "", "broke off a stream", false, retried, "", cooldownLine, ""},
	{Throttled, "", "throttles", false, "It has said when it accepts requests again.", "", cooldownLine, ""},
	{Failed, "", "answers with errors", false, retried, "", cooldownLine, ""},
}

// PoolRemedies lists the remedies of the problems of a pool or of a replica.
var PoolRemedies = []Remedy{
	{Unavailable, "", "no backend is available", true, "Solve the problems of its backends.", "OpenAILBModelNotServed", "no backend is available", "a backend is available again"},
	{NoFirstByte, "", "requests wait and get no byte", true, "See which backends hang, and check the status page of their provider. Add or resume other backends.", "OpenAILBNoFirstByte", "requests wait and get no byte", "requests no longer wait"},
	{NotWritten, "", "not saved", true, "Free space on the disk, or fix the disk or the storage. A restart now loses what is not saved.", "OpenAILBNotSaved", diskLine, ""},
	{StaleSecret, "", "could not reload", true, "Fix the file. The log says what is wrong with it.", "OpenAILBSecretStale", "could not reload secret", ""},
	{ReloadFailed, "", "the latest configuration could not be loaded", true, "The log says what is wrong with it. Correct it, and reload, or go back with reload --force. A restart now would fail.", "OpenAILBReloadFailed", caddyLine, ""},
	{ConfigDiffers, "", "configured differently", true, "Load the same configuration at each replica.", "OpenAILBReplicasDiffer", "configured differently", "configured alike again"},
	{NotInTouch, "", "not connected to other replicas", false, "This replica works on its own, and tries to connect. See whether it reaches the engine of state.", "OpenAILBReplicaNotConnected", "not connected to other replicas", ""},
	{AllThrottled, "", "all backends throttle", false, "Each has said when it accepts requests again. If that is usual, add capacity.", "", cooldownLine, ""},
}

// unknownRemedy is the remedy for classes without a row.
var unknownRemedy = Remedy{Meaning: "answers with errors", Next: retried, Log: cooldownLine}

// RemedyOf returns the remedy for a problem.
func RemedyOf(class Class, cause string) Remedy {
	for _, table := range [...][]Remedy{Remedies, PoolRemedies} {
		for i := range table {
			if r := &table[i]; r.Class == class && (r.Cause == cause || r.Cause == "") {
				return *r
			}
		}
	}
	return unknownRemedy
}
