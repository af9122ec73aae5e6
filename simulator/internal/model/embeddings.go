package model

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
)

func (g *Generation) embeddings() any {
	data := []object{}
	n := int64(defaultDimensions)
	if g.Request.Dimensions != nil {
		n = *g.Request.Dimensions
	}
	for i, input := range inputs(g.Request.Input) {
		var embedding any = embed(input, n)
		if g.Request.EncodingFormat == "base64" { // the official SDKs ask for it
			embedding, _ = binary.Append(nil, binary.LittleEndian, embedding)
		}
		data = append(data, object{"object": "embedding", "index": i, "embedding": embedding})
	}
	usage := object{"prompt_tokens": g.Prompt, "total_tokens": g.Prompt}
	return object{"object": "list", "data": data, "model": g.Model, "usage": usage}
}

// inputs splits what may be one or several. A string or a list of tokens is
// one; any other list is several.
func inputs(v any) []any {
	list, ok := v.([]any)
	if !ok {
		return []any{v}
	}
	if len(list) > 0 {
		if _, isToken := list[0].(float64); isToken {
			return []any{list}
		}
	}
	return list
}

// The length of a vector is that of the largest models at most.
const (
	defaultDimensions = 8
	mostDimensions    = 4096
)

// embed makes a vector of length 1 with n dimensions. The same input gives the
// same vector.
func embed(input any, n int64) []float32 {
	random := rand.New(rand.NewChaCha8(sha256.Sum256(fmt.Append(nil, input)))) //nolint:gosec // not a secret
	vector := make([]float32, n)
	var square float64
	for i := range vector {
		vector[i] = float32(random.NormFloat64())
		square += float64(vector[i]) * float64(vector[i])
	}
	for i := range vector {
		vector[i] = float32(float64(vector[i]) / math.Sqrt(square))
	}
	return vector
}
