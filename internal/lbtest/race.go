//go:build race

package lbtest

// Race reports whether the race detector is at work. It makes everything ten
// times as slow, and finds no more in ten times as many requests.
const Race = true
