package verdict

import (
	"bytes"
	"net/http"
	"regexp"
	"strings"
)

// Most providers answer with a 400, 403 or 404 both if the request is wrong and
// if its account lacks something: the model, the operation, a permission,
// money. Few have a code for it, so the text decides.
//
// A text may repeat parts of the request. A client could use that to make a
// backend look as if it had no budget. So a phrase counts only at the beginning
// of the message, before the first quote or colon, because repeated text
// follows these. A report may name a part of the request other than its model:
// its param, a tool, a file, an image, a URL. It is then about that part, even
// if it mentions "this model".

// phrase matches the beginnings of messages that have one meaning.
type phrase struct{ *regexp.Regexp }

// begins returns the phrase for messages that begin in one of these ways, in
// lower case and with single spaces. LiteLLM puts the name of an exception, or
// the path, before them.
func begins(ways ...string) phrase {
	return phrase{regexp.MustCompile(`^(?:(?:litellm[.])?\w+ ?error: |/[\w/]+: )?(?:` + strings.Join(ways, "|") + `)`)}
}

// mentions returns the phrase for messages with one of these words before the
// first quote or colon.
func mentions(words ...string) phrase {
	return phrase{regexp.MustCompile("^[^:\"'`“‘]{0,160}?\\b(?:" + strings.Join(words, "|") + `)`)}
}

// isIn reports whether a message begins with the phrase.
func (p phrase) isIn(message string) bool { return p.MatchString(message) }

// name matches the name of a model in a message, quoted or not. theModel
// matches the model as the subject of a sentence, with its name before or after
// the word.
const (
	name     = "(?:`[^`]*`|'[^']*'|\"[^\"]*\"|“[^”]*”|[^ ]+)"
	theModel = `(?:the |this |your |requested |specified |selected |provided |given |api |base )*(?:` + name +
		` )?(?:model|deployment|engine)(?: name| id| identifier| version)?:?(?: ` + name + `)?(?: with id ` + name + `)?`
)

var (
	// lacksModel: "The model `x` does not exist or you do not have access to
	// it." (OpenAI), "Unknown model: x" (Azure, GitHub), "Invalid model: x"
	// (Mistral), "x is not a valid model ID" and "No endpoints found for x."
	// (OpenRouter), "Model Not Exist" (DeepSeek), "models/x is not found for
	// API version v1beta" (Gemini), "model: x" as a not_found_error
	// (Anthropic).
	lacksModel = begins(
		theModel+` (?:does not|doesn't|not) exist\b`,
		theModel+` (?:(?:is |was |has |have |could )?(?:not|n't) (?:be(?:en)? )?found|is not available|isn't available|is unavailable)\b`,
		theModel+` (?:is|was|has been)(?: now| already)? (?:deprecated|decommissioned|retired|removed|discontinued|shut down)\b`,
		theModel+` is (?:no longer (?:available|supported)|unknown|invalid|not valid|not a valid|not recognized)\b`,
		theModel+` (?:is not|isn't) supported when using\b`, // Codex: "… with a ChatGPT account."
		`(?:unknown|invalid|unrecognized|no such|missing) (?:model|deployment)\b`,
		name+` is not a valid model\b`,
		`models?/[^ ]+ (?:is|was) not found\b`,
		`no endpoints found for\b`,
		`llm provider not provided\b`, // LiteLLM
		`(?:the |your )?(?:project|team|organization|account|key|user)(?: `+name+`)? (?:does not|doesn't) have access to (?:the )?model\b`,
		`(?:you (?:do not|don't) have access to|unable to access|no access to) (?:the |this )?model\b`,
		`the api deployment for this resource does not exist\b`,
		`the provided model identifier is invalid`, // Bedrock
	)

	// lacksOperation: "The chatCompletion operation does not work with the
	// specified model" (Azure), "This model is only supported in v1/responses
	// and not in v1/chat/completions.", "This is not a chat model", "The
	// requested model 'x' is not supported with the Responses API." (OpenAI),
	// "The requested model is not supported." (GitHub), "Flex processing is not
	// available for this model."
	lacksOperation = begins(
		`(?:the |this )?(?:requested |specified )?`+name+` (?:operation|api|endpoint) (?:does not|doesn't) work with\b`,
		`(?:the |this )?(?:requested |specified )?(?:`+name+` )?(?:operation|api|endpoint) is (?:not supported|unsupported|not available)\b`,
		theModel+` (?:is|are) only (?:supported|available) (?:in|by|with|through|via)\b`,
		`this is not an? `+name+` model\b`,
		theModel+` (?:is not|isn't) supported(?:[.]|$| (?:in|on|for|by|with|through|via) )`,
		theModel+` (?:is not|isn't) available (?:in|on|for|by|with|through|via) `,
		theModel+` (?:does not|doesn't) (?:support|have) (?:the |this )?(?:`+name+` ){0,3}?`+
			`(?:operation|api|endpoint|service tier|service_tier|tier|flex|priority)\b`,
		theModel+` (?:cannot|can not|can't|must not) be used (?:with|in|on) (?:the |this )?`+name+` (?:api|endpoint|operation)\b`,
		`(?:the )?(?:flex|priority|ultrafast|`+name+` (?:service tier|service_tier|tier|processing))`+
			`(?: processing| service tier| tier)? is (?:not (?:available|supported)|unavailable)\b`,
		`(?:unsupported|invalid|unavailable) service.tier\b`,
	)

	// unverified: OpenAI offers some models, streams and summaries only to
	// organizations that have verified their identity.
	unverified = mentions(
		`(?:organization|organisation|account|project|team|workspace)(?: must| has to| needs to) be (?:\w+ )?verified`,
		`(?:organization|organisation|account|identity) verification (?:is )?required`,
		`(?:only available to|requires a|limited to) (?:\w+ )?verified (?:organization|organisation|account)s?`,
		`(?:organization|organisation|account) is not (?:yet )?verified`,
		`verify your (?:organization|organisation|identity)\b`,
	)

	// outOfBudget: "Your credit balance is too low" and "You have reached your
	// specified API usage limits." (Anthropic), "Insufficient credits"
	// (OpenRouter), "Out of call volume quota." and "Token quota is exceeded."
	// (API Management).
	outOfBudget = mentions(
		`(?:credit|account|prepaid) balance\b`, `insufficient (?:\w+ )?(?:balance|credits?|quota|funds)\b`,
		`(?:reached|exceeded|hit|used up|over) (?:\w+ ){0,4}(?:usage|spend|spending|billing|budget) (?:hard )?(?:limits?|cap)\b`,
		`(?:usage|spend|spending|billing|budget) (?:hard )?(?:limits?|cap) (?:\w+ ){0,3}(?:reached|exceeded|hit|exhausted)\b`,
		`(?:out of|used all|no remaining|no|any) (?:\w+ )?credits\b`, `out of (?:\w+ )*quota\b`,
		`quota (?:is |has been |was )?(?:exceeded|exhausted|used up|reached|depleted)\b`,
		`exceeded (?:\w+ )*quota\b`, `key limit (?:reached|exceeded)\b`, `budget (?:is |has been |was )?(?:exceeded|exhausted)\b`,
		`account is not active, please check your billing`, `(?:overdue|unpaid) (?:payment|invoice|bill)`, `payment (?:is )?required`,
	)

	// closed: "This organization has been disabled." (Anthropic), "API key not
	// valid." (Gemini), "Incorrect API key provided" (xAI), all of them with a
	// 400.
	closed = mentions(
		`(?:organization|organisation|account|project|team|workspace|subscription)(?: associated with \w+ api key)?`+
			` (?:has been|is|was) (?:\w+ )?(?:disabled|deactivated|suspended|banned|terminated|closed)\b`,
		`(?:incorrect|invalid) api key\b`,
		`api key (?:is )?(?:not valid|invalid|expired|not found)\b`,
		`api key has (?:been (?:disabled|revoked)|expired)\b`,
	)

	// providerFailed: some gateways have no better status for a failure behind
	// them. "Failed to get response from provider" is Cloudflare's.
	providerFailed = mentions(
		`failed to get (?:a )?response from (?:the )?(?:provider|upstream|backend|model)`,
		`(?:the )?(?:server|provider|upstream|backend)(?: server)?`+
			` (?:had an error|encountered an error|failed|is down|timed out|is unreachable)`,
		`upstream (?:request|connect|connection|server|service) (?:failed|error|timeout|timed out)`,
		`internal (?:server )?error\b`,
		`bad gateway\b`,
		`litellm[.](?:internalservererror|serviceunavailableerror|badgatewayerror|apiconnectionerror|timeout)\b`,
		`(?:could not|cannot|unable to|failed to) (?:reach|connect to|contact) (?:the )?(?:provider|upstream|backend)`,
	)

	// refusesContent: a prompt that is refused with a 403, as by OpenRouter
	// ("Your input was flagged"), is not about the key.
	refusesContent = mentions(
		`(?:input|prompt|content|messages?)(?: \w+)? (?:was|were|is|are|has been|have been) (?:flagged|blocked|filtered|rejected)\b`,
		`requires moderation\b`, `(?:content|usage|safety) (?:policy|policies|filters?)\b`, `safety system\b`, `guardrails?\b`,
	)

	// lacksPath: messages about a path or an api-version that a server does not
	// have.
	lacksPath = begins(
		`resource not found\b`,
		`(?:the )?requested (?:url|resource|path|route|endpoint)\b.*\bnot found\b`,
		`file not found$`,
		`(?:invalid|unknown) (?:request )?(?:url|path|route|endpoint)\b`,
		`(?:no route matched|route not found|path not found|no static resource)\b`,
		`method not allowed[.]?$`,
		`(?:cannot|can't) (?:post|get) /`,
		`(?:the )?(?:requested |specified |provided )?api.version (?:`+name+` )?(?:is )?`+
			`(?:not supported|unsupported|invalid|not valid)\b`,
		`(?:unsupported|invalid|unknown) api.version\b`,
		// Azure
		`(?:[\w.]+ ){0,4}api is (?:enabled only|only enabled|only available|only supported) (?:for|in|with|from) api.version\b`,
	)
)

// parts are the words for parts of a request. A report that contains one of
// them is about that part.
var parts = map[string]bool{
	"parameter": true, "parameters": true, "argument": true, "arguments": true, "field": true, "property": true,
	"tool": true, "tools": true, "function": true, "functions": true, "file": true, "files": true,
	"image": true, "images": true, "url": true, "urls": true, "image_url": true, "audio": true, "input": true,
}

// parseRefusal parses a refusal as parseReport does. If the body is plain text,
// the text is the message.
func parseRefusal(body []byte) report {
	r := parseReport(body)
	if isPage(body) && bytes.TrimSpace(body)[0] != '<' {
		r.message = string(body[:min(len(body), maxBegin)])
	}
	return r
}

// namesPart reports whether a report is about a part of the request other than
// its model.
func (r report) namesPart() bool {
	if r.aboutPart() {
		return true
	}
	for word := range strings.FieldsSeq(r.begin()) {
		if parts[strings.Trim(word, ".,;:!?()\"'`")] {
			return true
		}
	}
	return false
}

// maxBegin is how much of a message is read.
const maxBegin = 400

// begin returns the beginning of the message, in lower case and with single
// spaces.
func (r report) begin() string {
	text := r.message
	if len(text) > maxBegin {
		text = text[:maxBegin]
	}
	text = strings.ReplaceAll(strings.ToLower(text), "’", "'")
	return strings.Join(strings.Fields(text), " ")
}

// refusal returns the class of a 4xx whose status does not show who is at
// fault. It is empty if the report says no more than the status. A code takes
// precedence over the text, and a code for the client's own mistake over
// everything. infers reports whether the request was for inference.
func (r report) refusal(infers bool) Class {
	byCode := meaningOf(r.code)
	text := r.begin()
	switch ofAPart := r.namesPart(); {
	case byCode.class == ClientError:
		return ClientError
	case r.param == "service_tier", unverified.isIn(text):
		return NotHere
	case !ofAPart && (r.means(Quota) || outOfBudget.isIn(text)):
		return Quota
	case !ofAPart && (r.means(Credential) || closed.isIn(text)):
		return Credential
	case refusesContent.isIn(text):
		return ClientError
	case r.failed(), !ofAPart && providerFailed.isIn(text):
		if r.means(Overloaded) {
			return Overloaded
		}
		return Failed
	case !ofAPart && lacksOperation.isIn(text), r.means(NotHere):
		return NotHere
	case r.means(NoModel), lacksModel.isIn(text), r.kind == notFoundError && strings.HasPrefix(text, "model: "):
		if ofAPart {
			return ClientError
		}
		return NoModel
	case infers && r.lacksPath(text):
		return NotHere
	}
	return ""
}

// notFoundError is Anthropic's error type for anything that does not exist.
const notFoundError = "not_found_error"

// cloudflareFailed is the code with which Cloudflare's AI Gateway reports, in a
// 400, that a provider failed.
const cloudflareFailed = 2005

// failed reports whether a code or a number says that a server has failed,
// whatever the status.
func (r report) failed() bool {
	return meaningOf(r.code).status >= http.StatusInternalServerError ||
		r.code == "" && meaningOf(r.kind).status >= http.StatusInternalServerError ||
		r.unsuccessful && r.number == cloudflareFailed || r.number >= 500 && r.number < 600
}

// lacksPath reports whether the report says that the backend lacks the path or
// its api-version.
func (r report) lacksPath(text string) bool {
	return r.code == "unknown_url" || strings.EqualFold(r.code, "UnsupportedApiVersion") ||
		r.unshaped && strings.TrimRight(text, ".") == "not found" ||
		!r.aboutPart() && lacksPath.isIn(text)
}

// LacksPath reports whether a reply to a request for inference says that the
// backend lacks the path, or its api-version. Then the class is [NotHere] for
// every request with that path.
func LacksPath(status int, body []byte) bool {
	switch {
	case !mayLackPath(status):
		return false
	case status != http.StatusBadRequest && isPage(body):
		return true
	}
	r := parseRefusal(body)
	return r.refusal(true) == NotHere && r.refusal(false) != NotHere
}

// mayLackPath reports whether servers use this status for a path, a method or
// an api-version that they lack.
func mayLackPath(status int) bool {
	return status == http.StatusNotFound || status == http.StatusMethodNotAllowed || status == http.StatusBadRequest
}

// isPage reports whether a body is not an API's, but for example the page of a
// firewall or of a web server. An empty body may come from anything, and so may
// one that cannot be decompressed.
func isPage(body []byte) bool {
	text := strings.TrimLeft(string(body[:min(len(body), 64)]), "\xef\xbb\xbf \t\r\n")
	return text != "" && text[0] > ' ' && text[0] != '{' && text[0] != '['
}
