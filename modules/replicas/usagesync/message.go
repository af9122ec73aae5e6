package usagesync

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"math"
	"math/bits"
	"slices"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// report is a message with the use of one replica for some callers of a pool.
// It contains digests instead of names. Its binary format is
//
//	reportPrefix
//	pool     the pool's digest, 16 bytes
//	writer   the replica's id, 16 bytes
//	version  which is greater in a later report, 8 bytes
//	windows  the current window of each unit, 5 varints
//
// followed by groups of callers with entries for the same windows of the same
// limits:
//
//	shape    a bit for each entry, as bitOf says, as a varint
//	number   of callers, as a varint
//	callers  each an id of 16 bytes, then a varint for each bit of the shape:
//	         first for those from resetBit on, then the use of each entry
//
// So a caller with four entries takes about 32 bytes. Bits above inFlightBit
// are for later versions, which may add values: they are skipped.
type report struct {
	pool, writer string
	version      uint64
	callers      []callerUse
}

// callerUse is the use of one caller.
type callerUse struct {
	id      ratelimit.CallerID
	entries []limiter.Entry
	// inFlight is the number of its requests in flight, if it has a maximum of
	// them.
	inFlight    int64
	hasInFlight bool
}

// reportPrefix begins all reports, but no other message. Its last byte is the
// version of the format. Reports of other versions are ignored.
const reportPrefix = "use\x03"

// IsReport reports whether a message is a report, perhaps of another version.
func IsReport(message []byte) bool { return bytes.HasPrefix(message, []byte(reportPrefix[:3])) }

const (
	digestSize = 16
	idSize     = 16
	units      = ratelimit.Units
	// entries is the maximum number of entries of a caller: two windows of each
	// limit.
	entries = 2 * ratelimit.MaxLimits
	// resetBit is set in the shape of callers that have had a reset.
	resetBit = 1 << entries
	// inFlightBit is set in the shape of callers with a maximum of requests in
	// flight.
	inFlightBit = resetBit << 1
	// maxHeader is the maximum number of bytes before the groups.
	maxHeader = len(reportPrefix) + 2*digestSize + 8 + units*binary.MaxVarintLen64
)

// reportWindows are the latest windows with any use, by unit.
type reportWindows [units]int64

// bitOf returns the entry's bit in a shape. ok is false if the entry's window
// is too old: it is before the previous window, or it is a day or month that is
// over.
func (w *reportWindows) bitOf(e limiter.Entry) (bit int, ok bool) {
	ago := w[e.ID.Unit()] - e.Window
	return 2*int(e.ID) + int(ago), ago == 0 || ago == 1 && !e.ID.Unit().Calendar()
}

// entry returns the entry of a bit.
func (w *reportWindows) entry(bit int, used, reset int64) limiter.Entry {
	id := ratelimit.ID(bit / 2)
	return limiter.Entry{ID: id, Window: w[id.Unit()] - int64(bit%2), Used: used, Reset: reset}
}

// shaped is the use of a caller with the shape of its entries.
type shaped struct {
	callerUse
	shape uint64
}

// appendHeader appends the part of a message before the windows.
func appendHeader(message []byte, pool, writer string, version uint64) []byte {
	message = append(message, reportPrefix...)
	message, _ = hex.AppendDecode(message, []byte(pool))
	message, _ = hex.AppendDecode(message, []byte(writer))
	return binary.BigEndian.AppendUint64(message, version)
}

// appendBody appends the windows and the groups.
func appendBody(message []byte, callers []callerUse) []byte {
	var w reportWindows
	for _, c := range callers {
		for _, e := range c.entries {
			w[e.ID.Unit()] = max(w[e.ID.Unit()], e.Window)
		}
	}
	for _, window := range w {
		message = binary.AppendVarint(message, window)
	}
	all := make([]shaped, 0, len(callers))
	for _, c := range callers {
		s := shaped{callerUse: callerUse{id: c.id, inFlight: c.inFlight, hasInFlight: c.hasInFlight}}
		for _, e := range c.entries {
			if bit, ok := w.bitOf(e); ok {
				s.shape |= 1 << bit
				s.entries = append(s.entries, e)
			}
		}
		if s.hasInFlight {
			s.shape |= inFlightBit
		}
		if s.shape != 0 {
			if len(s.entries) > 0 && s.entries[0].Reset > 0 {
				s.shape |= resetBit
			}
			slices.SortFunc(s.entries, func(a, b limiter.Entry) int {
				return cmp.Or(cmp.Compare(a.ID, b.ID), cmp.Compare(b.Window, a.Window))
			})
			all = append(all, s)
		}
	}
	slices.SortStableFunc(all, func(a, b shaped) int { return cmp.Compare(a.shape, b.shape) })
	for len(all) > 0 {
		n := 1
		for n < len(all) && all[n].shape == all[0].shape {
			n++
		}
		message = binary.AppendUvarint(message, all[0].shape)
		message = binary.AppendUvarint(message, uint64(n))
		for _, c := range all[:n] {
			message = append(message, c.id[:]...)
			if c.shape&resetBit != 0 {
				message = binary.AppendUvarint(message, uint64(c.entries[0].Reset))
			}
			if c.hasInFlight {
				message = binary.AppendUvarint(message, uint64(max(0, c.inFlight)))
			}
			for _, e := range c.entries {
				message = binary.AppendUvarint(message, uint64(max(0, e.Used)))
			}
		}
		all = all[n:]
	}
	return message
}

var errInvalid = errors.New("it is not a report of what callers use")

// decodeHeader returns the pool, the writer and the version of a report. body
// is the rest of the message.
func decodeHeader(message []byte) (r report, body []byte, err error) {
	body, ok := bytes.CutPrefix(message, []byte(reportPrefix))
	if !ok || len(body) < 2*digestSize+8 {
		return report{}, nil, errInvalid
	}
	r.pool, body = hex.EncodeToString(body[:digestSize]), body[digestSize:]
	r.writer, body = hex.EncodeToString(body[:digestSize]), body[digestSize:]
	r.version = binary.BigEndian.Uint64(body)
	return r, body[8:], nil
}

// decode decodes the body of a report and adds its callers.
func (r *report) decode(body []byte) error {
	in, failed := bytes.NewReader(body), false
	uvarint := func() uint64 {
		v, err := binary.ReadUvarint(in)
		failed = failed || err != nil
		return v
	}
	var w reportWindows
	for u := range w {
		window, err := binary.ReadVarint(in)
		if err != nil || window == math.MinInt64 { // there is none before it
			return errInvalid
		}
		w[u] = window
	}
	for in.Len() > 0 && !failed {
		shape, n := uvarint(), uvarint()
		bytesAtLeast := uint64(idSize + bits.OnesCount64(shape))
		if shape == 0 || n == 0 || n > uint64(in.Len())/bytesAtLeast {
			return errInvalid
		}
		for range n {
			var c callerUse
			_, err := io.ReadFull(in, c.id[:])
			failed = failed || err != nil
			reset := uint64(0)
			for mask := shape &^ (resetBit - 1); mask != 0; mask &= mask - 1 {
				value := uvarint()
				switch {
				case value > math.MaxInt64:
					return errInvalid
				case mask&-mask == resetBit:
					reset = value
				case mask&-mask == inFlightBit:
					c.inFlight, c.hasInFlight = int64(value), true
				}
			}
			for mask := shape & (resetBit - 1); mask != 0; mask &= mask - 1 {
				used := uvarint()
				if used > math.MaxInt64 {
					return errInvalid
				}
				c.entries = append(c.entries, w.entry(bits.TrailingZeros64(mask), int64(used), int64(reset)))
			}
			r.callers = append(r.callers, c)
		}
	}
	if failed {
		return errInvalid
	}
	return nil
}
