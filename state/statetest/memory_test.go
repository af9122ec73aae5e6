package statetest_test

import (
	"testing"

	"github.com/openai-lb/caddy-openai-lb/state"
	"github.com/openai-lb/caddy-openai-lb/state/statetest"
)

func TestTheStoreInMemoryIsAStore(t *testing.T) {
	hub := statetest.NewHub()
	statetest.Conform(t, func(t *testing.T) state.Store {
		hub.Flush()
		return hub.Store()
	})
}
