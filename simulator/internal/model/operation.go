package model

// Operation is the kind of a request.
type Operation int

// The operations. Those from OpChat to OpResponse have a body that names a model.
const (
	OpUnknown Operation = iota
	OpChat
	OpCompletion
	OpEmbedding
	OpTranscription
	OpResponse
	OpStoredResponse
	OpObject
	OpModels
	OpRealtime
)

// Generates reports whether the operation has a body that asks for a reply.
func (op Operation) Generates() bool { return op >= OpChat && op <= OpResponse }

// Limited reports whether the operation is one of a deployment, whose limits it counts
// towards.
func (op Operation) Limited() bool { return op.Generates() || op == OpRealtime }

// AzureName is the name of the operation in the text of Azure's 429.
func (op Operation) AzureName() string {
	switch op {
	case OpCompletion:
		return "Completions_Create"
	case OpEmbedding:
		return "Embeddings_Create"
	case OpTranscription:
		return "Transcriptions_Create"
	case OpResponse:
		return "Responses_Create"
	case OpRealtime:
		return "Realtime_Connect"
	default:
		return "ChatCompletions_Create"
	}
}
