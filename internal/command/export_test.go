package command

// FromLiteLLM is for tests that load what an import makes.
var FromLiteLLM = fromLiteLLM
