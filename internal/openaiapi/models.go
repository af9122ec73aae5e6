package openaiapi

import (
	"encoding/json"
	"time"
)

// MaxModelList is how much of a list of models is read. OpenAI's list has some
// ten kilobytes.
const MaxModelList = 4 << 20

// noticePeriod is how long before its shutdown a model is reported.
const noticePeriod = 60 * 24 * time.Hour

// ListedModel is a model in a provider's list of models.
type ListedModel struct {
	ID string
	// Shutdown is the beginning of the day, in UTC, on which the provider shuts
	// the model down. It is zero if the list has no date.
	Shutdown time.Time
}

// EndsSoon reports whether the model has been shut down, or will be within 60
// days.
func (m ListedModel) EndsSoon(now time.Time) bool {
	return !m.Shutdown.IsZero() && m.Shutdown.Before(now.Add(noticePeriod))
}

// ReadModels parses a list of models, or one model. more reports whether the
// list continues on another page. ok reports whether the text is a list or a
// model.
func ReadModels(text []byte) (models []ListedModel, more, ok bool) {
	type model struct {
		ID       string
		Shutdown json.RawMessage `json:"shutdown_date"`
	}
	var list struct {
		model
		Object  string
		Data    []model
		HasMore bool `json:"has_more"`
	}
	if err := json.Unmarshal(text, &list); err != nil || list.Data == nil && list.Object != "model" {
		return nil, false, false
	}
	if list.Data == nil {
		list.Data = []model{list.model}
	}
	models = make([]ListedModel, len(list.Data))
	for i, m := range list.Data {
		var date string
		_ = json.Unmarshal(m.Shutdown, &date) // a list with an odd date is a list
		models[i].ID = m.ID
		models[i].Shutdown, _ = time.Parse(time.DateOnly, date)
	}
	return models, list.HasMore, true
}
