package openaiapi

import "strings"

// inference is what the balancer knows of an operation that only makes a model
// do its work. The zero value stands for an operation that is not one.
type inference struct {
	// output is what limits the length of an answer.
	output output
	// mayAct reports whether a request has effects if its body asks for them.
	mayAct bool
	// countsOnly reports whether the operation only counts the tokens of a
	// prompt.
	countsOnly bool
	// namesNothing reports whether bodies name no stored objects.
	namesNothing bool
	// cachesPrompts reports whether providers cache its prompts.
	cachesPrompts bool
	// hasServiceTiers reports whether the API has service tiers for it.
	hasServiceTiers bool
	// showsUsageIfAsked reports whether a stream contains its usage only if the
	// client asks for it.
	showsUsageIfAsked bool
}

// output is what limits the number of tokens in an answer.
type output int

const (
	// unknownOutput may be limited by any member.
	unknownOutput output = iota
	// noOutput is an answer without tokens.
	noOutput
	// byMaxTokens is limited by "max_tokens", byMaxCompletionTokens also by
	// "max_completion_tokens", and byMaxOutputTokens by "max_output_tokens".
	byMaxTokens
	byMaxCompletionTokens
	byMaxOutputTokens
)

// inferences are the operations of [IsInference], written as in [Route].
var inferences = map[string]inference{
	"/chat/completions": {output: byMaxCompletionTokens, mayAct: true, cachesPrompts: true,
		hasServiceTiers: true, showsUsageIfAsked: true},
	"/completions": {output: byMaxTokens, namesNothing: true, cachesPrompts: true,
		showsUsageIfAsked: true},
	"/responses": {output: byMaxOutputTokens, mayAct: true, cachesPrompts: true,
		hasServiceTiers: true},
	"/responses/compact":      {output: byMaxOutputTokens, mayAct: true, cachesPrompts: true},
	"/responses/input_tokens": {output: noOutput, countsOnly: true},
	"/messages":               {output: byMaxTokens, mayAct: true, cachesPrompts: true},
	"/messages/count_tokens":  {output: noOutput, countsOnly: true},
	"/embeddings":             {output: noOutput, namesNothing: true},
	"/moderations":            {output: noOutput, namesNothing: true},
	"/rerank":                 {output: noOutput, namesNothing: true},
	"/decisions":              {output: noOutput, cachesPrompts: true},
	"/audio/speech":           {},
	"/audio/transcriptions":   {namesNothing: true},
	"/audio/translations":     {namesNothing: true},
	"/images/generations":     {namesNothing: true},
	"/images/edits":           {},
	"/images/variations":      {namesNothing: true},
	"/images/embeddings":      {output: noOutput},
}

// inferenceSegments are the first segments of these operations.
var inferenceSegments = func() map[string]bool {
	segments := make(map[string]bool)
	for operation := range inferences {
		segments[firstSegment(operation)] = true
	}
	return segments
}()

// firstSegment returns the first segment of a path that begins with a slash.
func firstSegment(path string) string {
	first, _, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	return first
}

// inferenceOf returns what is known of an operation, written as in Route, with
// or without a trailing slash.
func inferenceOf(operation string) inference {
	return inferences[strings.TrimSuffix(operation, "/")]
}

// limit returns the maximum number of tokens in an answer, or 0 if there is
// none.
func (o output) limit(m MaxOutput) int64 {
	switch o {
	case noOutput:
		return 0
	case byMaxTokens:
		return m.Tokens
	case byMaxCompletionTokens:
		return max(m.Tokens, m.Completion)
	case byMaxOutputTokens:
		return m.Output
	}
	return m.Largest()
}
