// Package keys handles the keys of callers and of backends: how they are
// presented, checked, reloaded and hidden.
//
//   - Presented: SDKs put the key of a caller in headers, in the query and in WebSocket
//     subprotocols. [Take] and [TakeFrom] separate [Presented], which is everything that
//     may be a key, from the rest, which may go to a backend.
//   - Checked: [Clients] knows the keys with which callers may use the balancer, and whose
//     they are. [PublicSites] finds the sites that anyone can use without a key.
//   - Reloaded: a key is written in a config as it is, or as a placeholder, {env.NAME} or
//     {file./path}, which [Resolve] replaces. A key in a file may change while Caddy runs:
//     [Reloader] reads it again. [Key] is such a key of a backend.
//   - Hidden: a backend may repeat the key that it was called with, in a header, a redirect
//     or an error page. [Secrets] are the keys of an attempt, and are removed from replies and logs.
//
// No error of this package contains a key, or the value of a placeholder.
package keys

// minLength is the length from which a key is recognized by its value. Callers
// without a key send short words in its place, and other values may be the same
// words.
const minLength = 8
