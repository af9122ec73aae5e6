package verdict

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"
)

// refusals are replies of providers and gateways, by what they mean for a
// request for inference.
var refusals = map[Class][]struct {
	status int
	body   string
}{
	NoModel: {
		{400, "{\"error\":{\"message\":\"/chat/completions: Invalid model name passed in model=x. Call `/v1/models` to view available models for your key.\",\"type\":\"None\",\"param\":\"None\",\"code\":\"400\"}}"}, // LiteLLM
		{400, `{"error":{"message":"litellm.BadRequestError: LLM Provider NOT provided. Pass in the LLM provider you are trying to call. You passed model=x","type":null,"param":null,"code":"400"}}`},
		{400, `{"errors":[{"message":"AiError: No such model @cf/x or task","code":5007}],"success":false,"result":{},"messages":[]}`}, // Cloudflare
		{400, `{"error":{"code":"unknown_model","message":"Unknown model: gpt-9","details":"Unknown model: gpt-9"}}`},
		{404, `{"error":{"code":"unknown_model","message":"Unknown model: /Phi-3.5-MoE-instruct"}}`},
		{400, `{"error":{"message":"The model 'x' does not exist","type":"invalid_request_error","param":"model","code":"model_not_found"}}`},
		{404, "{\"error\":{\"message\":\"The model `x` does not exist or you do not have access to it.\",\"type\":\"invalid_request_error\",\"param\":null,\"code\":null}}"},
		{404, `{"error":{"message":"The model gpt-9 does not exist or you do not have access to it.","type":"invalid_request_error"}}`},
		{400, `{"detail":"The 'gpt-9' model is not supported when using Codex with a ChatGPT account."}`},
		{404, "{\"object\":\"error\",\"message\":\"The model `x` does not exist.\",\"type\":\"NotFoundError\",\"param\":null,\"code\":404}"}, // vLLM
		{400, `{"object":"error","message":"Invalid model: x","type":"invalid_model","param":null,"code":"1500"}`},                           // Mistral
		{404, `{"error":{"message":"model 'x' not found","type":"not_found_error","param":null,"code":null}}`},                               // Ollama
		{404, `{"error":"model \"x\" not found, try pulling it first"}`},                                                                     // Ollama
		{404, `{"type":"error","error":{"type":"not_found_error","message":"model: claude-9"},"request_id":"req_1"}`},                        // Anthropic
		{400, `{"error":{"message":"x/y is not a valid model ID","code":400}}`},                                                              // OpenRouter
		{404, `{"error":{"message":"No endpoints found for x/y.","code":404}}`},                                                              // OpenRouter
		{400, `{"error":{"message":"Model Not Exist","type":"invalid_request_error","param":null,"code":"invalid_request_error"}}`},          // DeepSeek
		{400, "{\"error\":{\"message\":\"The model `x` has been decommissioned and is no longer supported.\",\"type\":\"invalid_request_error\",\"code\":\"model_decommissioned\"}}"},
		{404, `{"error":{"message":"{\n  \"error\": {\n    \"code\": 404,\n    \"message\": \"models/gemini-9 is not found for API version v1beta, or is not supported for generateContent.\",\n    \"status\": \"NOT_FOUND\"\n  }\n}\n","code":404,"status":"Not Found"}}`},
		{404, `{"code":"Some requested entity was not found","error":"The model grok-9 does not exist or your team 1 does not have access to it."}`},                 // xAI
		{400, "{\"error\":{\"message\":\"Invalid model name passed in model=x. Call `/v1/models` to view available models for your key.\",\"code\":\"400\"}}"},       // LiteLLM
		{404, `{"error":{"code":"404","message":"The API deployment for this resource does not exist. If you created it within the last 5 minutes, please wait."}}`}, // Azure
		{410, `{"error":{"message":"The model 'x' has been retired."}}`},
	},
	NotHere: {
		{400, `{"error":{"code":"BadRequest","message":"Azure OpenAI Responses API is enabled only for api-version 2025-03-01-preview and later"}}`},
		{400, `{"error":{"code":"OperationNotSupported","message":"The chatCompletion operation does not work with the specified model, x. Please choose different model and try again."}}`},
		{400, `{"error":{"message":"The completion operation does not work with the specified model, x.","code":null}}`},
		{404, `{"error":{"message":"This model is only supported in v1/responses and not in v1/chat/completions.","type":"invalid_request_error","param":"model","code":null}}`},
		{404, `{"error":{"message":"This is not a chat model and thus not supported in the v1/chat/completions endpoint. Did you mean to use v1/completions?","param":"model"}}`},
		{400, `{"error":{"message":"The requested model 'x' is not supported with the Responses API.","type":"invalid_request_error","param":"model","code":"model_not_found"}}`},
		{400, `{"error":{"message":"The requested model is not supported.","code":"model_not_supported","param":"model","type":"invalid_request_error"}}`},
		{400, `{"error":{"message":"{\"error\":{\"message\":\"The requested model is not supported.\",\"code\":\"model_not_supported\",\"param\":\"model\"}}\n","type":"error"}}`},
		{400, `{"error":{"message":"Model is not supported for this request.","param":"model","type":"invalid_request_error"}}`},
		{400, `{"error":{"message":"Flex processing is not available for this model.","type":"invalid_request_error","param":null}}`},
		{400, `{"error":{"message":"Invalid service_tier argument.","type":"invalid_request_error","param":"service_tier"}}`},
		{400, `{"error":{"message":"This model does not support the priority tier.","type":"invalid_request_error","param":null}}`},
		// paths
		{404, `{"error":{"code":"404","message":"Resource not found"}}`},
		{404, `{ "statusCode": 404, "message": "Resource not found" }`},
		{404, `{"error":{"message":"Invalid URL (POST /v1/responses)","type":"invalid_request_error","param":null,"code":null}}`},
		{404, `{"error":{"message":"Unknown request URL: POST /v1/responses. Please check the URL for typos.","code":"unknown_url"}}`},
		{404, `{"detail":"Not Found"}`},          // FastAPI
		{405, `{"detail":"Method Not Allowed"}`}, // FastAPI
		{404, `{"message":"no Route matched with those values"}`},
		{404, `{"timestamp":1,"status":404,"error":"Not Found","path":"/v1/responses"}`}, // Spring
		{404, `404 page not found`},
		{404, `<html><head><title>404 Not Found</title></head></html>`},
		{400, `{"error":{"code":"BadRequest","message":"API version not supported"}}`},
		{404, `{"error":{"code":404,"message":"File Not Found","type":"not_found_error"}}`}, // llama.cpp
		// accounts that have not shown a passport
		{400, `{"error":{"message":"Your organization must be verified to stream this model. Please go to: https://platform.openai.com/settings/organization/general","type":"invalid_request_error","param":"stream","code":"unsupported_value"}}`},
		{400, `{"error":{"message":"Your organization must be verified to generate reasoning summaries. Please go to: …","type":"invalid_request_error","param":"reasoning.summary","code":"unsupported_value"}}`},
		{403, "{\"error\":{\"message\":\"Your organization must be verified to use the model `gpt-image-1`. Please go to: …\",\"type\":\"invalid_request_error\",\"param\":null,\"code\":null}}"},
		{403, `{"error":{"message":"This model is limited to verified organizations.","type":"invalid_request_error"}}`},
		{403, `{"error":{"message":"To access this model, please verify your organization.","type":"invalid_request_error"}}`},
		{400, `{"error":{"message":"You must verify your organization to use this feature","type":"invalid_request_error","param":"stream"}}`},
		{400, `{"object":"error","message":"The model does not support Chat Completions API","type":"BadRequestError","param":null,"code":400}`}, // vLLM
		{404, "{\"error\":{\"message\":\"Your organization must be verified to use the model `o3`.\",\"code\":\"model_not_found\"}}"},
		{400, `{"error":{"message":"Organization verification is required for this feature.","param":"background"}}`},
		{400, `{"error":{"code":"data_residency_mismatch","message":"no"}}`},
	},
	Quota: {
		{400, `{"type":"error","error":{"type":"invalid_request_error","message":"Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing to upgrade or purchase credits."},"request_id":"req_1"}`},
		{400, `{"type":"error","error":{"type":"invalid_request_error","message":"You have reached your specified API usage limits. You will regain access on 2026-11-01 at 00:00 UTC."}}`},
		{429, `{"error":{"message":"Your account is not active, please check your billing details on our website.","type":"billing_not_active","param":null,"code":"billing_not_active"}}`},
		{403, `{"error":{"message":"Your account is not active, please check your billing details on our website.","type":"billing_not_active","code":null}}`},
		{429, `{"error":{"code":"usage_limit_exceeded","message":"no"}}`},
		{429, `{"error":{"type":"usage_limit_reached","message":"The usage limit has been reached","plan_type":"team","resets_in_seconds":392723}}`},
		{400, `{"code":"Arrearage","message":"Access denied, please make sure your account is in good standing."}`},
		{403, `{"error":{"message":"Insufficient Balance","type":"unknown_error"}}`},
		{400, `{"type":"error","error":{"type":"billing_error","message":"There is an issue with your billing"}}`},
		{403, `{"error":{"message":"Key limit exceeded (daily limit). Manage it using https://openrouter.ai/settings/keys","code":403}}`},                  // OpenRouter
		{400, `{"error":{"message":"Budget has been exceeded! Current cost: 10.1, Max budget: 10.0","type":"budget_exceeded","param":null,"code":"400"}}`}, // LiteLLM
		{429, `{"error":{"message":"ExceededBudget: User=x over budget. Spend=1.2, Budget=1.0","type":"budget_exceeded","param":null,"code":"429"}}`},
		{403, `{"error":{"code":"insufficient_user_quota","message":"no","type":"new_api_error"}}`},
		{403, `{"code":"The caller does not have permission to execute the specified operation","error":"Your team 1 has either used all available credits or reached its monthly spending limit."}`},
		{403, `{ "statusCode": 403, "message": "Out of call volume quota. Quota will be replenished in 22.14:18:12." }`},
		{403, `{ "statusCode": 403, "message": "Token quota is exceeded. Try again in 1 hour 2 minutes." }`},
		{403, `Token quota is exceeded. Try again in 1 hour 2 minutes.`},
		{403, `{"error":{"message":"Too many tokens. Please retry after 30 seconds."}}`},
		{400, `{"error":{"message":"You exceeded your current quota, please check your plan and billing details."}}`},
	},
	Credential: {
		{400, `{"type":"error","error":{"type":"invalid_request_error","message":"This organization has been disabled."},"request_id":"req_1"}`},
		{400, `{"error":{"code":400,"message":"API key not valid. Please pass a valid API key.","status":"INVALID_ARGUMENT"}}`},                      // Gemini
		{400, `{"code":"Client specified an invalid argument","error":"Incorrect API key provided: sk***1. You can obtain an API key from there."}`}, // xAI
		{403, `{"error":{"message":"Your account has been suspended due to a violation."}}`},
		{403, `{"error":{"message":"Your organization has been suspended for a violation of our usage policies."}}`},
		{400, `{"error":{"code":"account_deactivated","message":"no"}}`},
		{403, `{"error":{"message":"Access denied due to Virtual Network/Firewall rules."}}`},
		{403, `{"message":"Forbidden"}`},
		{403, ``},
	},
	Failed: {
		{400, `{"success":false,"result":[],"messages":[],"error":[{"code":2005,"message":"Failed to get response from provider"}]}`},
		{400, `{"success":false,"error":[{"code":2005,"message":"in other words"}]}`},
		{400, `{"success":false,"errors":[{"code":2005,"message":"Failed to get response from provider"}],"messages":[],"result":null}`},
		{400, `{"error":{"message":"Provider returned error","code":502,"metadata":{"provider_name":"x"}}}`}, // OpenRouter
		{400, `{"error":{"message":"litellm.InternalServerError: AzureException - no","type":null,"param":"None","code":"400"}}`},
		{403, `{"error":{"message":"The server had an error while processing your request. Sorry about that!","type":"server_error","param":null,"code":null}}`},
		{403, `{"error":{"code":"InternalServerError","message":"no"}}`},
		{422, `{"error":{"message":"Upstream request failed","type":"error"}}`},
		{404, `{"error":{"message":"Unable to connect to upstream"}}`},
		{400, `{"error":{"message":"Internal server error"}}`},
	},
	Overloaded: {
		{400, `{"error":{"code":"server_is_overloaded","message":"no"}}`},
		{403, `{"error":{"type":"overloaded_error","message":"Overloaded"}}`},
	},
	Blocked: {
		{403, `<!DOCTYPE html><html><head><title>Attention Required! | Cloudflare</title></head></html>`},
		{403, "\r\n<html>\r\n<head><title>403 Forbidden</title></head><body>Microsoft-Azure-Application-Gateway/v2</body></html>"},
		{403, `Request blocked. Support ID: 1`},
		{403, `<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>`},
	},
	// what speaks of a model, an account or a limit, and is the client's all
	// the same
	ClientError: {
		{403, `{"error":{"code":403,"message":"openai/gpt-4 requires moderation on OpenAI. Your input was flagged for \"sexual\".","metadata":{"reasons":["sexual"]}}}`},
		{403, `{"error":{"message":"Request blocked by guardrail","code":403}}`},
		{403, `{"error":{"message":"The prompt was rejected by our safety filters."}}`},
		{400, `{"title":"One or more validation errors occurred.","errors":{"model":["The model does not exist"]}}`}, // ASP.NET
		{400, `{"error":{"message":"Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.","type":"invalid_request_error","param":"max_tokens","code":"unsupported_parameter"}}`},
		{400, `{"error":{"message":"Unsupported value: 'temperature' does not support 0.2 with this model.","type":"invalid_request_error","param":"temperature","code":"unsupported_value"}}`},
		{400, `{"error":{"message":"'logprobs' is not supported with this model.","type":"invalid_request_error","param":null}}`},
		{400, `{"error":{"message":"This model does not support image input.","type":"invalid_request_error","param":null}}`},
		{400, `{"error":{"message":"This model is not supported with tools.","type":"invalid_request_error","param":null}}`},
		{404, `{"error":{"message":"No endpoints found that support tool use. To learn more about provider routing, visit: …","code":404}}`},
		{400, `{"error":{"message":"The model 'gpt-image-9' of the image_generation tool does not exist.","type":"invalid_request_error","param":null,"code":"model_not_found"}}`},
		{400, `{"error":{"message":"The model of this file does not exist.","code":"model_not_found"}}`},
		{400, `{"error":{"message":"The model does not exist.","param":"tools[0].model","code":"unknown_model"}}`},
		{400, `{"error":{"message":"Invalid value: 'Your credit balance is too low'. Supported values are: 'a' and 'b'.","param":null}}`},
		{400, `{"error":{"message":"Your credit balance is too low","param":"messages[0].content"}}`},
		{400, `{"error":{"message":"messages.0: Your credit balance is too low","type":"invalid_request_error"}}`},
		{400, `{"error":{"message":"The prompt says \"This organization has been disabled.\"","type":"invalid_request_error"}}`},
		{400, `{"error":{"message":"Invalid prompt: internal server error","type":"invalid_request_error"}}`},
		{404, `{"error":{"message":"Response with id 'resp_1' not found.","type":"invalid_request_error","code":null}}`},
		{404, `{"error":{"message":"No such File object: file-1","param":"id"}}`},
		{404, ``},
		{404, `{"error":{"message":"Not found","type":"invalid_request_error","param":null,"code":null}}`}, // what is not found may be an object
		{400, `{"error":{"code":"bio_policy","message":"no"}}`},
		{403, `{"error":{"code":"cyber_policy","message":"no"}}`},
		{400, `{"error":{"code":"weapons_policy_violation","message":"no"}}`},
		{400, `{"error":{"code":"moderation_blocked","message":"Your request was rejected by the safety system.","type":"image_generation_user_error"}}`},
		{422, `{"detail":[{"type":"missing","loc":["body","messages"],"msg":"Field required","input":{"model":"unknown model"}}]}`},
	},
}

func TestWhoIsAtFaultInARefusal(t *testing.T) {
	for want, replies := range refusals {
		for _, reply := range replies {
			if got := Judge(Reply{Status: reply.status, Body: []byte(reply.body), Infers: true}); got != want {
				t.Errorf("%d %s is %s, want %s", reply.status, reply.body, got, want)
			}
		}
	}
}

func TestAPathIsTheBackendsOnlyForInference(t *testing.T) {
	for _, reply := range refusals[NotHere] {
		lacks := LacksPath(reply.status, []byte(reply.body))
		got := Judge(Reply{Status: reply.status, Body: []byte(reply.body)})
		if lacks != (got == ClientError) {
			t.Errorf("%d %s: it lacks the path %v, and without inference it is %s", reply.status, reply.body, lacks, got)
		}
	}
	for class, replies := range refusals {
		for _, reply := range replies {
			if class != NotHere && LacksPath(reply.status, []byte(reply.body)) {
				t.Errorf("%d %s lacks the path, but it is %s", reply.status, reply.body, class)
			}
		}
	}
}

// TestNoClientCanMakeABackendLookBroke has a model's name, and a value, that
// sound like an account without money.
func TestNoClientCanMakeABackendLookBroke(t *testing.T) {
	for _, reply := range append(refusals[Quota], refusals[Credential]...) {
		r := parseRefusal([]byte(reply.body))
		for _, message := range []string{
			"The model `" + r.message + "` does not exist.", "Unknown model: " + r.message, "Invalid value: '" + r.message + "'.",
			"'" + r.message + "' is too long", "messages.0.content: " + r.message,
		} {
			body := []byte(fmt.Sprintf(`{"error":{"message":%q}}`, message))
			if got := Judge(Reply{Status: 400, Body: body, Infers: true}); got != ClientError && got != NoModel && r.message != "" {
				t.Errorf("%s is %s", body, got)
			}
		}
	}
}

func TestA403WithATimeIsAQuota(t *testing.T) {
	for _, header := range []http.Header{headers("retry-after: 3720"), headers("retry-after-ms: 100"), headers("retry-after: Wed, 21 Oct 2026 07:28:00 GMT")} {
		for _, body := range []string{`{"message":"no"}`, `<html>`, ``} {
			if got := Judge(Reply{Status: 403, Header: header, Body: []byte(body)}); got != Quota {
				t.Errorf("%v %q is %s", header, body, got)
			}
		}
	}
	header := headers("retry-after: 20")
	if got := Judge(Reply{Status: 403, Header: header, Body: []byte(`{"error":{"code":"missing_scope"}}`)}); got != NotPermitted {
		t.Errorf("a missing scope is %s", got)
	}
}

func TestAnUnknownCodeOfAFailedResponseIsUnclear(t *testing.T) {
	for code, want := range map[string]Class{
		`"mass_persuasion"`:        Unclear,
		`"some_new_word.v2"`:       Unclear,
		`"CapabilityGate"`:         Unclear,
		`"server_error"`:           Failed,
		`null`:                     Failed,
		`"a text, and not a code"`: Failed,
	} {
		body := []byte(`{"error":{"code":` + code + `,"message":"no"}}`)
		if got := Judge(Reply{Status: Status(body), Body: body, OfResponse: true}); got != want {
			t.Errorf("%s is %s, want %s", code, got, want)
		}
		if got := Judge(Reply{Status: Status(body), Body: body}); got != Failed {
			t.Errorf("%s of another reply is %s, want a failure", code, got)
		}
	}
	for _, class := range []Class{Unclear, Blocked} {
		if !class.Failover() || class.Blames() || class.Promise() || class.OfCredential() || RemedyOf(class, "").NeedsOperator || class.Shared() || class.MayBeOfRequest() || class.WholeBackend() {
			t.Errorf("%s implies more than that another backend may serve", class)
		}
	}
}

func TestTimesInTheTextOfALimit(t *testing.T) {
	// now is Wed, 21 Oct 2026 07:28:00 UTC
	for text, want := range map[string]time.Duration{
		"You have reached your specified API usage limits. You will regain access on 2026-11-01 at 00:00 UTC.": 10*day + 16*time.Hour + 32*time.Minute,
		"Usage limit reached. Your limit will reset at 2026-10-21 07:41:44":                                    13*time.Minute + 44*time.Second,
		"usage limit exceeded, resets at 2026-10-21T15:00:00Z (2056)":                                          7*time.Hour + 32*time.Minute,
		"Your limit resets at 2026-10-21T10:00:00+02:00.":                                                      32 * time.Minute,
		"Token quota is exceeded. Try again in 1 hour 2 minutes.":                                              62 * time.Minute,
		"Out of call volume quota. Quota will be replenished in 22.14:18:12.":                                  22*day + 14*time.Hour + 18*time.Minute + 12*time.Second,
		"Quota will be replenished in 00:05:30":                                                                5*time.Minute + 30*time.Second,
		"Rate limited. Limit resets in 3h12m":                                                                  3*time.Hour + 12*time.Minute,
		"Your quota renews on Oct 22, 2026 at 7:28 AM UTC":                                                     day,
		"It resets October 21st, 2026, 8:28 GMT":                                                               time.Hour,
		"Please wait 30 seconds before you try again":                                                          30 * time.Second,
		"Please wait for about 5 minutes":                                                                      5 * time.Minute,
		"It will be available again in 90 seconds":                                                             90 * time.Second,
		"Please try again in an hour.":                                                                         time.Hour,
		"Try again in about 5 minutes":                                                                         5 * time.Minute,
		"Please retry after 2026-10-21T07:28:12Z":                                                              12 * time.Second,
		"Try again on 2026/10/22":                                                                              16*time.Hour + 32*time.Minute,
		`{"error":{"type":"usage_limit_reached","resets_at":1792567691,"resets_in_seconds":392723}}`:           11 * time.Second,
		`{"error":{"resets_in_seconds": 392723}}`:                                                              392723 * time.Second,
		`{"retry_after":20}`:                                                                                   20 * time.Second,
		`{"error":{"metadata":{"retry_after_ms": 120}}}`:                                                       120 * time.Millisecond,
		`{"reset_at":"2026-10-21T07:29:00Z"}`:                                                                  time.Minute,
	} {
		if wait, source := ReadHint(429, nil, []byte(text), now); wait != want || source != ErrorText {
			t.Errorf("%q: got %v from %q, want %v", text, wait, source, want)
		}
		if wait, source := HintOf(Quota, 400, nil, []byte(text), now); wait != want || source != ErrorText {
			t.Errorf("%q in a quota's 400: got %v from %q, want %v", text, wait, source, want)
		}
	}
	for _, text := range []string{
		"Your limit was reset at 2026-10-21 07:00:00", "It resets at 8pm (America/New_York)", "resets in a few minutes", "It resets on 2026-13-45",
		"preset in 5 minutes", "Please wait", "wait, 5 of 9", "reset your key in 3 steps", "Your plan renews at some time in 2027", "reset_at: null", `{"resets_at":null}`,
		`{"resets_at":1692567691}`, "You waited 20 seconds", strings.Repeat("reset on ", 20),
	} {
		if wait, source := ReadHint(429, nil, []byte(text), now); source != NoHint {
			t.Errorf("%q: got %v from %q, want none", text, wait, source)
		}
	}
}
