package openaiapi

import (
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// IsInference reports whether a request only makes a model do its work: answer,
// embed, transcribe, draw, rank or decide. Such a request may be retried after
// a failure. If a model works twice, that costs twice, but leaves no second
// file or batch behind.
//
// The operation is written as in [Route]. Only those in the table inferences
// count, exactly as they are written there. Paths below them, such as
// /responses/{id}/cancel, are about stored objects.
func IsInference(method, operation string) bool {
	if method != http.MethodPost {
		return false
	}
	_, known := inferences[strings.TrimSuffix(operation, "/")]
	return known
}

// IsUsage reports whether a request asks for its caller's usage, which the
// balancer answers.
func IsUsage(method string, route Route) bool {
	return strings.TrimSuffix(route.Operation, "/") == "/usage" && route.Deployment == "" &&
		(method == http.MethodGet || method == http.MethodHead)
}

// infersByWebSocket reports whether the messages of a WebSocket of this
// operation are requests for inference. The operation is written as in Route.
func infersByWebSocket(operation string) bool {
	return isOneOf(operation, "/realtime", "/responses")
}

// isOneOf reports whether an operation, written as in Route, is one of these,
// with or without a trailing slash.
func isOneOf(operation string, operations ...string) bool {
	return slices.Contains(operations, strings.TrimSuffix(operation, "/"))
}

// mayInfer reports whether a server may treat the request as [IsInference],
// even if its path is spelled differently.
func mayInfer(method, operation string) bool {
	return IsInference(method, operation) || method == http.MethodPost && IsInference(method, mostCommon(operation))
}

// MayBeResponses reports whether a server may treat the operation as
// /responses, even if it is spelled differently.
func MayBeResponses(operation string) bool { return mostCommon(operation) == "/responses" }

// IsMessages reports whether a path is Anthropic's messages, or below it. The
// path is as url.URL.EscapedPath returns it. It may be spelled differently, and
// may have any prefix before its /v1.
func IsMessages(escapedPath string) bool {
	path := mostCommon(escapedPath)
	operation := ParsePath(path).Operation
	if _, below, found := strings.Cut(path, openAIPrefix+"/"); found {
		operation = "/" + below
	}
	return isOfMessages(operation)
}

// isOfMessages reports whether an operation, written as in Route, is
// Anthropic's messages, or below it.
func isOfMessages(operation string) bool {
	return operation == "/messages" || strings.HasPrefix(operation, "/messages/")
}

// mostCommon returns the usual spelling of an operation.
func mostCommon(operation string) string {
	return strings.ToLower(asOthersRead(unescapeOr(operation, url.PathUnescape)))
}

// CachesPrompts reports whether providers cache the prompts of an operation of
// [IsInference].
func CachesPrompts(operation string) bool { return inferenceOf(operation).cachesPrompts }

// repeatable reports whether a request may be retried if it is unknown whether
// it was executed: it is inference, or its method is safe (RFC 9110 section
// 9.2.1). TRACE is missing because no backend gets it.
func repeatable(method, operation string) bool {
	return method == http.MethodGet || method == http.MethodHead || method == http.MethodOptions ||
		IsInference(method, operation)
}
