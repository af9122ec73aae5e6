package statuspage

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"fmt"
	"html"
	"html/template"
	"strconv"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
)

//go:embed page
var files embed.FS

// templates have the part of the page that changes. The rest is put together
// without a template, because html/template changes scripts and styles, of
// which the Content-Security-Policy has the digests.
var templates = template.Must(template.New("").Funcs(template.FuncMap{
	"clock":   func(t time.Time) string { return t.UTC().Format("15:04:05") },
	"day":     func(t time.Time) string { return t.UTC().Format("2 Jan 15:04:05") },
	"millis":  func(t time.Time) int64 { return t.UnixMilli() },
	"title":   func(s string) string { return strings.ToUpper(s[:1]) + s[1:] },
	"words":   words,
	"cut":     cut,
	"short":   func(n int64) string { return short(float64(n)) },
	"percent": percent,
	"seconds": seconds,
	"detail":  detail,
	"several": several[int],
	"many":    several[int64],
	"episode": episodeText,
	"ends":    episodeEnd,
	"where":   where,
	"runbook": status.RunbookURL,
	"shares":  sharesOf,
	"limits":  limitsOf,
	"refused": refusedOf,
	"reasons": refusals,
	"count":   func(n uint64) string { return short(float64(n)) },
}).ParseFS(files, "page/state.html"))

var (
	style, script = mustRead("page/style.css"), mustRead("page/script.js")
	shell         = strings.NewReplacer(
		"{style}", style, "{script}", script, "{version}", html.EscapeString(metrics.Version()), "{caddy}", html.EscapeString(metrics.CaddyVersion()),
	).Replace(mustRead("page/shell.html"))
	contentSecurityPolicy = fmt.Sprintf("default-src 'none'; style-src '%s'; script-src '%s'; connect-src 'self'; img-src data:; "+
		"base-uri 'none'; form-action 'self'; frame-ancestors 'none'", digest(style), digest(script))
)

func mustRead(name string) string {
	text, err := files.ReadFile(name)
	if err != nil {
		panic(err)
	}
	return string(text)
}

// digest returns the name of a text in a Content-Security-Policy.
func digest(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "sha256-" + base64.StdEncoding.EncodeToString(sum[:])
}

// assemble puts the part of the page that changes into the rest.
func assemble(fragment []byte, tools string, now time.Time) []byte {
	var page bytes.Buffer
	_, _ = strings.NewReplacer(
		"{state}", string(fragment), "{tools}", tools, "{now}", strconv.FormatInt(now.UnixMilli(), 10), "{time}", now.UTC().Format("15:04:05"),
	).WriteString(&page, shell)
	return page.Bytes()
}

// maxName is how many letters of a name are shown.
const maxName = 64

// cut shortens a name, such as that of a model, which clients can make up.
func cut(name string) string {
	if letters := []rune(name); len(letters) > maxName {
		return string(letters[:maxName-1]) + "…"
	}
	return name
}
