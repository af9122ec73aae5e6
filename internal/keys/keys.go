// Package keys handles the keys of callers and of backends: how they are
// presented, checked, reloaded and hidden.
//
//   - Presented: SDKs put the key of a caller in headers, in the query and in
//     WebSocket subprotocols. [Read] collects everything in a request that may
//     be a key as [Presented], and [Presented.Outgoing] returns the header for
//     a backend without it.
//   - Checked: [Clients] maps the keys of callers to their names. [PublicSites]
//     finds the sites that anyone can use without a key.
//   - Reloaded: a key is written in a config as it is, or as a placeholder,
//     {env.NAME} or {file./path}, which [Resolve] replaces. A key in a file may
//     change while Caddy runs: a [Reloader] reads it again. [Key] is such a key
//     of a backend.
//   - Hidden: a backend may repeat the key that it was called with, in a
//     header, a redirect or an error page. [Secrets] are the keys of an
//     attempt, and are removed from replies and logs.
//
// No error of this package contains a key, or the value of a placeholder.
package keys

// minLength is the length from which a key is recognized by its value. Callers
// without a key send short words instead, and other values may be the same
// words.
const minLength = 8
