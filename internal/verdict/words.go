package verdict

import (
	"net/http"
	"strings"
)

// meaning is the meaning of a provider's code or type of an error.
type meaning struct {
	// status is the HTTP status of an error with this word inside a reply of
	// status 200.
	status int
	// class is the class of a reply with this word. It is empty if the word
	// says no more than the status.
	class Class
}

// words is the one table of the words that providers use for errors. An error
// has the same meaning as a reply with its own status and inside a reply of
// status 200.
//
// The types of Azure's Responses API are user_error, forbidden and
// too_many_requests (Microsoft Learn, "Azure OpenAI Responses API"). The codes
// of a failed response are listed in openai-python
// (types/responses/response_error.py). All codes about images are client
// errors: the image is in the request, or is an address or a file that the
// request names. If the address cannot be reached, another backend would not
// reach it either.
var words = map[string]meaning{
	// of nearly every 4xx, also of those about keys and models
	"invalid_request_error": {status: http.StatusBadRequest},
	"invalid_request":       {status: http.StatusBadRequest},

	// an MCP server that the request names
	"external_connector_error":       {http.StatusFailedDependency, ClientError},
	"user_error":                     {http.StatusBadRequest, ClientError},
	"content_filter":                 {http.StatusBadRequest, ClientError},
	"content_policy_violation":       {http.StatusBadRequest, ClientError},
	"invalid_prompt":                 {http.StatusBadRequest, ClientError},
	"invalid_image":                  {http.StatusBadRequest, ClientError},
	"invalid_image_format":           {http.StatusBadRequest, ClientError},
	"invalid_base64_image":           {http.StatusBadRequest, ClientError},
	"invalid_image_url":              {http.StatusBadRequest, ClientError},
	"invalid_image_mode":             {http.StatusBadRequest, ClientError},
	"image_too_large":                {http.StatusBadRequest, ClientError},
	"image_too_small":                {http.StatusBadRequest, ClientError},
	"image_parse_error":              {http.StatusBadRequest, ClientError},
	"image_content_policy_violation": {http.StatusBadRequest, ClientError},
	"image_file_too_large":           {http.StatusBadRequest, ClientError},
	"image_file_not_found":           {http.StatusBadRequest, ClientError},
	"unsupported_image_media_type":   {http.StatusBadRequest, ClientError},
	"empty_image_file":               {http.StatusBadRequest, ClientError},
	"failed_to_download_image":       {http.StatusBadRequest, ClientError},
	"previous_response_not_found":    {http.StatusBadRequest, ClientError},
	unreadableContent:                {http.StatusBadRequest, ClientError},
	"bio_policy":                     {http.StatusBadRequest, ClientError},
	"cyber_policy":                   {http.StatusBadRequest, ClientError},
	"misalignment_policy_violation":  {http.StatusBadRequest, ClientError},
	"moderation_blocked":             {http.StatusBadRequest, ClientError}, // OpenAI's images
	"data_inspection_failed":         {http.StatusBadRequest, ClientError}, // DashScope
	"invalid_input":                  {http.StatusBadRequest, ClientError},
	"invalid_file":                   {http.StatusBadRequest, ClientError},
	"unsupported_file":               {http.StatusBadRequest, ClientError},
	"max_output_tokens":              {http.StatusBadRequest, ClientError},
	"session_budget_exceeded":        {http.StatusBadRequest, ClientError}, // which the client has set
	"executor_version_incompatible":  {http.StatusBadRequest, ClientError},
	"response_not_found":             {http.StatusBadRequest, ClientError}, // and so on: of response.steer
	"response_not_active":            {http.StatusBadRequest, ClientError},
	"response_already_completed":     {http.StatusBadRequest, ClientError},
	"steering_not_supported":         {http.StatusBadRequest, ClientError},
	"active_turn_not_steerable":      {http.StatusBadRequest, ClientError},
	"too_many_pending_steers":        {http.StatusBadRequest, ClientError},
	anyPolicy:                        {http.StatusBadRequest, ClientError},
	anyPolicyViolation:               {http.StatusBadRequest, ClientError},

	"OperationNotSupported":     {http.StatusBadRequest, NotHere}, // Azure: the model lacks the operation
	"unsupported_api_for_model": {http.StatusBadRequest, NotHere}, // GitHub
	"model_not_supported":       {http.StatusBadRequest, NotHere}, // GitHub
	// OpenAI: the account is in another part of the world
	"data_residency_mismatch": {http.StatusBadRequest, NotHere},

	"context_length_exceeded":   {http.StatusBadRequest, TooLarge}, // OpenAI, Azure
	"exceed_context_size_error": {http.StatusBadRequest, TooLarge}, // llama.cpp

	"authentication_error":     {status: http.StatusUnauthorized},
	"invalid_api_key":          {http.StatusUnauthorized, Credential},
	"account_deactivated":      {http.StatusUnauthorized, Credential},
	"account_suspended":        {http.StatusUnauthorized, Credential},
	"organization_deactivated": {http.StatusUnauthorized, Credential},
	"organization_disabled":    {http.StatusUnauthorized, Credential},

	"forbidden":        {status: http.StatusForbidden},
	"missing_scope":    {http.StatusForbidden, NotPermitted}, // OpenAI: a restricted key
	"PermissionDenied": {http.StatusForbidden, NotPermitted}, // Azure: a role without the operation

	"model_not_found":      {http.StatusNotFound, NoModel},
	"DeploymentNotFound":   {http.StatusNotFound, NoModel},
	"deployment_not_found": {http.StatusNotFound, NoModel},
	"unknown_model":        {http.StatusNotFound, NoModel}, // GitHub, Foundry
	"invalid_model":        {http.StatusNotFound, NoModel}, // Mistral
	"model_not_available":  {http.StatusNotFound, NoModel}, // Together
	"model_decommissioned": {http.StatusNotFound, NoModel}, // Groq
	"ModelNotFound":        {http.StatusNotFound, NoModel}, // DashScope

	"unknown_url":        {status: http.StatusNotFound},
	"resource_not_found": {status: http.StatusNotFound},
	"request_timeout":    {status: http.StatusRequestTimeout},

	"too_many_requests":        {status: http.StatusTooManyRequests},
	"rate_limit_error":         {status: http.StatusTooManyRequests},
	"rate_limit_exceeded":      {status: http.StatusTooManyRequests},
	"rate_limit_reached":       {status: http.StatusTooManyRequests}, // Azure
	"RateLimitReached":         {status: http.StatusTooManyRequests}, // Azure
	"rate_limit_reached_error": {status: http.StatusTooManyRequests}, // Moonshot
	"rate_limited":             {status: http.StatusTooManyRequests}, // Mistral
	"tokens":                   {status: http.StatusTooManyRequests},
	"requests":                 {status: http.StatusTooManyRequests},

	"insufficient_quota":                {http.StatusTooManyRequests, Quota},
	"credit_balance_exhausted":          {http.StatusTooManyRequests, Quota},
	"billing_hard_limit_reached":        {http.StatusTooManyRequests, Quota},
	"organization_usage_limit_exceeded": {http.StatusTooManyRequests, Quota},
	"billing_not_active":                {http.StatusTooManyRequests, Quota},
	"usage_limit_exceeded":              {http.StatusTooManyRequests, Quota},
	"usage_limit_reached":               {http.StatusTooManyRequests, Quota}, // Codex
	"insufficient_user_quota":           {http.StatusTooManyRequests, Quota}, // New API
	"insufficient_balance":              {http.StatusTooManyRequests, Quota},
	"Arrearage":                         {http.StatusTooManyRequests, Quota}, // DashScope
	"budget_exceeded":                   {http.StatusTooManyRequests, Quota}, // LiteLLM
	"billing_error":                     {http.StatusPaymentRequired, Quota}, // Anthropic
	anySpendLimit:                       {http.StatusTooManyRequests, Quota},
	"enforced_spend_limit_reached":      {http.StatusTooManyRequests, Quota}, // Anthropic
	"exceeded_current_quota_error":      {http.StatusTooManyRequests, Quota}, // Moonshot

	"no_capacity":               {http.StatusTooManyRequests, Overloaded},
	"slow_down":                 {http.StatusTooManyRequests, Overloaded},
	"engine_overloaded_error":   {http.StatusTooManyRequests, Overloaded}, // Moonshot
	"flex_unavailable":          {http.StatusTooManyRequests, Overloaded},
	"server_overloaded":         {http.StatusServiceUnavailable, Overloaded},
	"server_is_overloaded":      {http.StatusServiceUnavailable, Overloaded},
	"overloaded_error":          {http.StatusServiceUnavailable, Overloaded}, // Anthropic
	"service_unavailable_error": {status: http.StatusServiceUnavailable},

	"server_error":              {status: http.StatusInternalServerError},
	"sandbox_error":             {status: http.StatusInternalServerError},
	"successor_creation_failed": {status: http.StatusInternalServerError},
	"connection_failed":         {status: http.StatusBadGateway},
	"internal_error":            {status: http.StatusInternalServerError},
	"internal_server_error":     {status: http.StatusInternalServerError},
	"InternalServerError":       {status: http.StatusInternalServerError},
	"vector_store_timeout":      {status: http.StatusGatewayTimeout}, // the backend's own search of files took too long
}

// Suffixes that stand for all words with that suffix:
// organization_spend_limit_exceeded and similar, and the policies that refuse a
// prompt, whose number grows from year to year.
const (
	anySpendLimit      = "_spend_limit_exceeded"
	anyPolicy          = "_policy"
	anyPolicyViolation = "_policy_violation"
)

// meaningOf returns the meaning of a word. It is empty for an unknown word.
func meaningOf(word string) meaning {
	for _, end := range []string{anySpendLimit, anyPolicy, anyPolicyViolation} {
		if strings.HasSuffix(word, end) {
			word = end
		}
	}
	return words[word]
}
