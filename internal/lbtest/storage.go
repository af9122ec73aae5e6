package lbtest

import (
	"bytes"
	"context"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/certmagic"
)

func init() { caddy.RegisterModule(new(memory)) }

// memory is the storage of worlds. A disk would have to be waited for in each
// of them.
type memory struct {
	mu    sync.Mutex
	files map[string][]byte
	// full are words of keys that cannot be stored.
	full []string
}

// inMemory is the one of all worlds.
var inMemory memory

// CaddyModule returns the Caddy module information.
func (*memory) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "caddy.storage.test", New: func() caddy.Module { return &inMemory }}
}

// CertMagicStorage implements caddy.StorageConverter.
func (m *memory) CertMagicStorage() (certmagic.Storage, error) { return m, nil }

// clear removes all files.
func (m *memory) clear() {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.files)
}

// FillStorage lets nothing be stored under keys with this word, such as the
// name of a pool, as if the disk were full. The returned function ends that.
func FillStorage(word string) (free func()) {
	m := &inMemory
	m.mu.Lock()
	defer m.mu.Unlock()
	m.full = append(m.full, word)
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.full = slices.DeleteFunc(m.full, func(w string) bool { return w == word })
	}
}

// Store implements certmagic.Storage.
func (m *memory) Store(_ context.Context, key string, value []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if slices.ContainsFunc(m.full, func(word string) bool { return strings.Contains(key, word) }) {
		return &fs.PathError{Op: "write", Path: key, Err: syscall.ENOSPC}
	}
	if m.files == nil {
		m.files = make(map[string][]byte)
	}
	m.files[key] = bytes.Clone(value)
	return nil
}

// Load implements certmagic.Storage.
func (m *memory) Load(_ context.Context, key string) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	value, ok := m.files[key]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return bytes.Clone(value), nil
}

// Delete implements certmagic.Storage.
func (m *memory) Delete(_ context.Context, key string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.files, key)
	return nil
}

// Exists implements certmagic.Storage.
func (m *memory) Exists(ctx context.Context, key string) bool {
	_, err := m.Load(ctx, key)
	return err == nil
}

// List implements certmagic.Storage.
func (m *memory) List(_ context.Context, prefix string, _ bool) (keys []string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for key := range m.files {
		if strings.HasPrefix(key, prefix+"/") {
			keys = append(keys, key)
		}
	}
	return keys, nil
}

// Stat implements certmagic.Storage.
func (m *memory) Stat(ctx context.Context, key string) (certmagic.KeyInfo, error) {
	value, err := m.Load(ctx, key)
	return certmagic.KeyInfo{Key: key, Size: int64(len(value)), IsTerminal: true}, err
}

// Lock implements certmagic.Locker.
func (*memory) Lock(context.Context, string) error { return nil }

// Unlock implements certmagic.Locker.
func (*memory) Unlock(context.Context, string) error { return nil }
