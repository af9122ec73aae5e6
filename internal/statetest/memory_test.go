package statetest_test

import (
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/statetest"
	"github.com/openai-lb/caddy-openai-lb/state"
)

func TestTheStoreInMemoryIsAStore(t *testing.T) {
	hub := statetest.NewHub()
	statetest.Conform(t, func(t *testing.T) state.Store {
		hub.Flush()
		return hub.Store()
	})
}
