package attempt

import (
	"bytes"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
)

// arrivals are what comes at a time. sizes are those of the buffers that were read into.
type arrivals struct {
	left  []string
	sizes []int
	fails error
}

func (a *arrivals) Read(p []byte) (n int, err error) {
	a.sizes = append(a.sizes, len(p))
	if n = copy(p, a.left[0]); n < len(a.left[0]) {
		a.left[0] = a.left[0][n:]
	} else if a.left = a.left[1:]; len(a.left) == 0 {
		err = a.fails
	}
	return n, err
}

func TestTheBufferOfATunnelGrowsWithWhatComes(t *testing.T) {
	const kib = 1 << 10
	long, lost := strings.Repeat("x", 70*kib), errors.New("the connection is lost")
	for name, c := range map[string]struct {
		comes  []string
		option int
		fails  error
		sizes  []int
	}{
		"events of text":        {[]string{"a", "b", "c"}, 0, io.EOF, []int{4 * kib, 4 * kib, 4 * kib}},
		"a long message":        {[]string{"a", long, "b"}, 0, io.EOF, []int{4 * kib, 4 * kib, 8 * kib, 16 * kib, 32 * kib, 32 * kib, 32 * kib}},
		"with a smaller option": {[]string{long[:3*kib]}, kib, io.EOF, []int{kib, kib, kib}},
		"with a larger option":  {[]string{long, long}, 64 * kib, io.EOF, []int{4 * kib, 8 * kib, 16 * kib, 32 * kib, 64 * kib, 64 * kib, 64 * kib}},
		"with a senseless one":  {[]string{"a", "b"}, -1, io.EOF, []int{4 * kib, 4 * kib}},
		"a failure":             {[]string{"a", ""}, 0, lost, []int{4 * kib, 4 * kib}},
	} {
		var got bytes.Buffer
		want, from := strings.Join(c.comes, ""), &arrivals{left: c.comes, fails: c.fails}
		n, err := copyTunnel(&got, from, c.option)
		if got.String() != want || n != int64(len(want)) || errors.Is(c.fails, io.EOF) != (err == nil) || !slices.Equal(from.sizes, c.sizes) {
			t.Errorf("%s: %d of %d bytes in buffers of %v, want %v: %v", name, n, len(want), from.sizes, c.sizes, err)
		}
	}
	if n, err := copyTunnel(&limit{io.Discard, 1}, strings.NewReader("abc"), 0); n != 1 || !errors.Is(err, io.ErrShortWrite) {
		t.Errorf("a write that fails copies %d bytes: %v", n, err)
	}
}
