//go:build !race

package bubble

// Race reports whether the race detector is at work.
const Race = false
