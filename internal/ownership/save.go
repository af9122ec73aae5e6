package ownership

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"time"
)

// The format of a saved memory, with little-endian numbers:
//
//	magic
//	number of accounts, 4 bytes; for each: length, 2 bytes; text
//	number of ids, 4 bytes; for each:
//	    key, 16 bytes; caller, 8; index of the account, 4;
//	    when the id is forgotten, 4: Unix time in seconds
//	CRC-32 of all of that, 4 bytes
const magic = "openai_lb ids 2\n"

const (
	savedID = 16 + 8 + 4 + 4
	// maxAccounts and maxAccount limit the accounts of a saved memory.
	maxAccounts = 1 << 16
	maxAccount  = 1 << 10
)

// Save returns the contents of the memory for Load. They contain no ids, names
// of callers or keys.
func (m *Memory) Save(now time.Time) []byte {
	ids := make([]byte, 0, m.Len()*savedID)
	count := uint32(0)
	for i := range m.parts {
		m.parts[i].each(func(e entry) {
			if e.until <= seconds(now) {
				return
			}
			count++
			caller := e.caller
			if !caller.Named() {
				caller = 0
			}
			ids = append(ids, e.key[:]...)
			ids = binary.LittleEndian.AppendUint64(ids, uint64(caller))
			ids = binary.LittleEndian.AppendUint32(ids, e.account)
			ids = binary.LittleEndian.AppendUint32(ids, e.until)
		})
	}
	accounts := *m.accounts.Load() // all that the ids name, because it only grows
	saved := make([]byte, 0, len(magic)+len(ids)+64*len(accounts)+12)
	saved = append(saved, magic...)
	// there are as many accounts as configs name
	saved = binary.LittleEndian.AppendUint32(saved, uint32(len(accounts))) //nolint:gosec // see above
	for _, account := range accounts {
		account = account[:min(len(account), maxAccount)]
		saved = binary.LittleEndian.AppendUint16(saved, uint16(len(account))) //nolint:gosec // within bounds
		saved = append(saved, account...)
	}
	saved = binary.LittleEndian.AppendUint32(saved, count)
	saved = append(saved, ids...)
	return binary.LittleEndian.AppendUint32(saved, crc32.ChecksumIEEE(saved))
}

var errDamaged = errors.New("the saved ids are damaged")

// Load adds saved owners, and returns the number of ids. An owner that was
// learned since stays, but if its caller is not known, it gets the saved
// caller. Load adds nothing if the data does not come from Save.
func (m *Memory) Load(saved []byte, now time.Time) (ids int, err error) {
	if !bytes.HasPrefix(saved, []byte(magic)) {
		return 0, fmt.Errorf("the saved ids are not in the format %q", magic[:len(magic)-1])
	}
	body, sum := saved[:len(saved)-4], saved[len(saved)-4:] // the magic is longer
	if crc32.ChecksumIEEE(body) != binary.LittleEndian.Uint32(sum) || len(body) < len(magic) {
		return 0, errDamaged
	}
	input := bytes.NewBuffer(body[len(magic):])
	number := func(size int) (n int64) {
		for i, b := range input.Next(size) {
			n |= int64(b) << (8 * i)
		}
		return n
	}
	accounts := make([]string, 0, 16)
	for n := number(4); n > 0; n-- {
		length := int(number(2))
		text := input.Next(length)
		if len(text) < length || length > maxAccount || len(accounts) == maxAccounts {
			return 0, errDamaged
		}
		accounts = append(accounts, string(text))
	}
	count := number(4)
	left := input.Bytes()
	if int64(len(left)) != count*savedID {
		return 0, errDamaged
	}
	// all is checked before anything is added
	for at := 24; at < len(left); at += savedID {
		if int(binary.LittleEndian.Uint32(left[at:])) >= len(accounts) {
			return 0, errDamaged
		}
	}
	for ; len(left) > 0; left = left[savedID:] {
		owner := Owner{
			Account: accounts[binary.LittleEndian.Uint32(left[24:])],
			Caller:  CallerDigest(binary.LittleEndian.Uint64(left[16:])),
		}
		ttl := time.Unix(int64(binary.LittleEndian.Uint32(left[28:])), 0).Sub(now)
		id := Key(left[:16])
		known, ok := m.Get(id, now)
		if ok {
			owner.Account = known.Account // it was seen there since
		}
		if ttl > 0 && (!ok || !known.Caller.Named() && owner.Caller.Named()) {
			m.Put(id, owner, now, ttl)
			ids++
		}
	}
	return ids, nil
}
