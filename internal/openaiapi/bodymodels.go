package openaiapi

import (
	"encoding/json"
	"iter"
	"net/http"
)

// furtherModels is a member of a body that names further models: a list of
// fallbacks, or the settings of a session.
type furtherModels struct {
	span
	session bool
}

func (b *Body) addOther(o furtherModels) {
	if len(b.others) == maxModels {
		b.Clear = false
		return
	}
	b.others = append(b.others, o)
}

// useSession uses the model of the body's session as the model of the body,
// unless the body names a model itself. The body must be the one that was
// parsed.
func (b *Body) useSession(body []byte) {
	if b.HasModel || b.models.first.end > 0 {
		return
	}
	for _, o := range b.others {
		if !o.session {
			continue
		}
		s := ParseJSON(body[o.start:o.end], nil)
		if !s.HasModel {
			continue
		}
		b.Model, b.HasModel, b.inSession = s.Model, true, true
		b.addModel(s.models.first.in(o.span))
		for _, more := range s.models.others {
			b.addModel(more.in(o.span))
		}
	}
}

// in returns the span of a part of whole as a span of the text that has whole.
func (s span) in(whole span) span { return span{whole.start + s.start, whole.start + s.end} }

// makesSession reports whether the body of a request describes a realtime
// session, because the request begins one or creates a secret for one.
func makesSession(method, operation string) bool {
	return method == http.MethodPost &&
		isOneOf(operation, "/realtime/calls", "/realtime/client_secrets", "/realtime/translations/calls", "/realtime/translations/client_secrets")
}

// OtherModels yields the models that the body names elsewhere than in "model":
// in the lists "models" and "fallbacks", and in "session", including its model
// for transcription. The body must be the one that was parsed. ok is false for
// a model that cannot be read, or that servers may read differently.
func (b Body) OtherModels(body []byte) iter.Seq2[string, bool] {
	return func(yield func(model string, ok bool) bool) {
		for _, o := range b.others {
			text := body[o.start:o.end]
			if o.session {
				if s := ParseJSON(text, nil); (s.HasModel || !s.Clear) &&
					!yield(s.Model, s.Clear && s.HasModel && !s.NamesSeveral()) {
					return
				}
				for _, t := range [][]byte{
					memberOf(text, "input_audio_transcription"), memberOf(memberOf(memberOf(text, "audio"), "input"), "transcription"),
				} {
					if m := memberOf(t, "model"); m != nil && !yield(Text(m), m[0] == '"') {
						return
					}
				}
				continue
			}
			var list []json.RawMessage
			if json.Unmarshal(text, &list) != nil && !yield("", false) {
				return
			}
			for _, item := range list {
				if !yield(modelIn(item)) {
					return
				}
			}
		}
	}
}

// modelIn returns the model of a list item, which is a name or an object with a
// model.
func modelIn(item json.RawMessage) (model string, ok bool) {
	if json.Unmarshal(item, &model) == nil {
		return model, true
	}
	b := ParseJSON(item, nil)
	return b.Model, b.Clear && b.HasModel && !b.NamesSeveral()
}

// NamesOthers reports whether OtherModels yields a model.
func (b Body) NamesOthers() bool { return len(b.others) > 0 }
