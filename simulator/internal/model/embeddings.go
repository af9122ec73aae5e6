package model

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
)

func (g *Generation) embeddings() any {
	data := []any{}
	n := int64(defaultDimensions)
	if g.Request.Dimensions != nil {
		n = *g.Request.Dimensions
	}
	for i, input := range inputs(g.Request.Input) {
		vector := embed(input, n)
		e := map[string]any{"object": "embedding", "index": i, "embedding": vector}
		if g.Request.EncodingFormat == "base64" {
			// The official SDKs ask for base64 and decode it.
			buf := make([]byte, 0, 4*n)
			for _, value := range vector {
				buf = binary.LittleEndian.AppendUint32(buf, math.Float32bits(value))
			}
			e["embedding"] = base64.StdEncoding.EncodeToString(buf)
		}
		data = append(data, e)
	}
	usage := map[string]int64{"prompt_tokens": g.Prompt, "total_tokens": g.Prompt}
	return map[string]any{"object": "list", "data": data, "model": g.Model, "usage": usage}
}

// inputs splits what may be one or several. A string or a list of tokens is one;
// any other list is several.
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
