package lbtest

import "github.com/openai-lb/caddy-openai-lb/internal/bubble"

// Race reports whether the race detector is at work. It makes everything ten
// times as slow, and finds no more in ten times as many requests.
const Race = bubble.Race
