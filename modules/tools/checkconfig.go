package tools

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/spf13/cobra"

	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/cli"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// checkedConfig is where a configuration comes from.
type checkedConfig struct {
	file, adapter string
	envFiles      []string
	// offline replaces each secret and variable that is not set by a stand-in.
	offline bool
}

// provision sets the configuration up without starting it, and calls use with
// its pools. Nothing listens and no request is made. The loggers of the
// configuration are not opened: warnings go to stderr.
func (c checkedConfig) provision(use func([]*pools.Entry) error) error {
	cfg := &caddy.Config{Logging: &caddy.Logging{Logs: map[string]*caddy.CustomLog{
		caddy.DefaultLoggerName: {BaseLog: caddy.BaseLog{Level: "WARN"}},
	}}}
	base, err := caddy.ProvisionContext(cfg) // before Caddy logs what it reads
	if err != nil {
		return err
	}
	if err := loadEnvFiles(c.envFiles); err != nil {
		return err
	}
	apps, err := c.read()
	if err != nil {
		return err
	}
	cfg.AppsRaw = apps
	ctx, cleanUp := caddy.NewContext(base)
	defer cleanUp()
	before := pools.Default.Entries()
	for _, name := range slices.Sorted(maps.Keys(apps)) {
		if !c.offline && name != "http" {
			continue // it has no balancer
		}
		if _, err := ctx.App(name); err != nil {
			return shortened(err, cmp.Or(c.file, "Caddyfile"))
		}
	}
	if err := reachable(ctx); err != nil {
		return err
	}
	var entries []*pools.Entry
	for _, e := range pools.Default.Entries() {
		if e.Rechecker != nil && !slices.Contains(before, e) {
			entries = append(entries, e)
		}
	}
	return use(entries)
}

// readBackends is a ReadBackends.
func readBackends(file string) (all []Configured, err error) {
	err = checkedConfig{file: file, offline: true}.provision(func(entries []*pools.Entry) error {
		for _, e := range entries {
			for _, b := range e.Rechecker.(*backend.Rechecker).Backends {
				all = append(all, Configured{e.Name, b.Name, b.Origin.Hostname(), b.Names()})
			}
		}
		return nil
	})
	return all, err
}

// reachable returns an error if no request reaches one of the balancers. It
// sends no request through the routes, although those of a server that does not
// listen would take one: forward_auth would ask its own server, and a request
// without the password, header or address that a site requires reaches no
// balancer of a site that is right.
func reachable(ctx caddy.Context) error {
	configured, err := ctx.AppIfConfigured("http")
	if err != nil {
		return nil // there is none
	}
	app, found := configured.(*caddyhttp.App), []caddyhttp.MiddlewareHandler(nil)
	keys.Unreachable(app, func(h caddyhttp.MiddlewareHandler) bool {
		if module, ok := h.(caddy.Module); ok && module.CaddyModule().ID == "http.handlers.openai_lb" {
			found = append(found, h)
		}
		return false
	})
	for _, lb := range found {
		if names := keys.Unreachable(app, func(h caddyhttp.MiddlewareHandler) bool { return h == lb }); names != nil {
			return fmt.Errorf("no request reaches an openai_lb: %s in front of it answers every one",
				strings.Join(names, ", "))
		}
	}
	return nil
}

// read returns the apps of the configuration.
func (c checkedConfig) read() (caddy.ModuleMap, error) {
	text, file, _, err := caddycmd.LoadConfig(c.file, c.adapter)
	if err != nil {
		return nil, err
	}
	if file == "" && len(text) == 0 {
		return nil, errors.New("there is no Caddyfile in this folder: expected --config <path>")
	}
	text = caddy.RemoveMetaFields(text)
	if c.offline {
		if text, err = standIns(text); err != nil {
			return nil, err
		}
	}
	var config *caddy.Config
	if err := caddy.StrictUnmarshalJSON(text, &config); err != nil {
		return nil, fmt.Errorf("decoding config: %w", err)
	}
	if config == nil {
		return nil, errors.New("the configuration is empty")
	}
	return config.AppsRaw, nil
}

// standIns replaces each secret and variable of a JSON config that is not set
// here.
func standIns(text []byte) ([]byte, error) {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	var config any
	if err := decoder.Decode(&config); err != nil {
		return nil, err
	}
	return json.Marshal(standIn("", config))
}

// standIn returns the value of a field of a config with stand-ins in it. Each
// variable has a different one, because the names of backends and the keys of
// clients must differ.
func standIn(field string, value any) any {
	switch value := value.(type) {
	case map[string]any:
		if value["handler"] == "openai_lb" {
			standInVariables(value)
		}
		leaveOutCertificates(value)
		for name, v := range value {
			value[name] = standIn(name, v)
		}
	case []any:
		if field == "load_files" {
			value = slices.DeleteFunc(value, isMissingCertificate)
		}
		for i, v := range value {
			value[i] = standIn(field, v)
		}
		return value
	case string:
		return standInText(field, value)
	}
	return value
}

// isMissingCertificate reports whether a certificate of the option tls, or its
// key, is not here.
func isMissingCertificate(entry any) bool {
	files, _ := entry.(map[string]any)
	return isMissing(files["certificate"]) || isMissing(files["key"])
}

// leaveOutCertificates removes from the TLS of connections the client's
// certificate and key, and the authorities, whose files are not here.
func leaveOutCertificates(config map[string]any) {
	const certificate, key = "client_certificate_file", "client_certificate_key_file"
	if _, ok := config[certificate]; ok && (isMissing(config[certificate]) || isMissing(config[key])) {
		delete(config, certificate)
		delete(config, key)
	}
	authorities, _ := config["ca"].(map[string]any)
	if files, _ := authorities["pem_files"].([]any); authorities["provider"] == "file" &&
		slices.ContainsFunc(files, isMissing) {
		delete(config, "ca")
	}
}

func isMissing(path any) bool {
	name, _ := path.(string)
	_, err := os.Stat(name)
	return err != nil
}

// placeholder matches a variable or a file, and the character before it.
var placeholder = regexp.MustCompile(`(^|.)\{(env|file)\.([^{}]*)\}`)

func standInText(field, text string) string {
	missing := false
	replaced := placeholder.ReplaceAllStringFunc(text, func(match string) string {
		parts := placeholder.FindStringSubmatch(match)
		before, kind, name := parts[1], parts[2], parts[3]
		if kind == "env" && strings.TrimSpace(os.Getenv(name)) != "" {
			return match
		}
		if kind == "file" {
			if content, err := cli.ReadFile(name); err == nil && len(bytes.TrimSpace(content)) > 0 {
				return match
			}
		}
		missing = true
		if before == ":" { // a port
			return ":443"
		}
		return before + fmt.Sprintf("stand-in-%.8x", sha256.Sum256([]byte(kind+name)))
	})
	switch {
	case field == "client_keys_file" && !strings.Contains(replaced, "{"):
		if _, err := cli.ReadFile(replaced); err != nil {
			return os.DevNull // a file without keys
		}
	case missing && field == "url" && !strings.Contains(replaced, "://"):
		return "https://" + replaced
	case missing && field == "ranges":
		return "192.0.2.0/24"
	case missing && field == "address" && !strings.Contains(replaced, ":"):
		return replaced + ":443"
	}
	return replaced
}

// standInVariables gives an openai_lb a backend if the variables of
// backends_from_env are not set.
func standInVariables(handler map[string]any) {
	prefix, _ := handler["backends_from_env"].(string)
	if prefix == "" {
		return
	}
	if found, _, _, err := backend.FromEnv(prefix); err != nil || len(found) > 0 {
		return // Provision says what is wrong
	}
	delete(handler, "backends_from_env")
	list, _ := handler["backends"].([]any)
	handler["backends"] = append(list, map[string]any{"url": "https://stand-in.invalid"})
}

// lineNumber finds the line in an error of an environment file.
var lineNumber = regexp.MustCompile(`line \d+`)

// loadEnvFiles sets the variables of files, exactly as `caddy run` does. Caddy
// exports no function for that, but its command validate does it first, and
// then ends at once because its configuration is empty. The error holds no
// value.
func loadEnvFiles(files []string) error {
	if len(files) == 0 {
		return nil
	}
	validate := &cobra.Command{SilenceErrors: true, SilenceUsage: true}
	caddycmd.Commands()["validate"].CobraFunc(validate)
	args := []string{"--config", os.DevNull}
	for _, file := range files {
		args = append(args, "--envfile", file)
	}
	validate.SetArgs(args)
	err := validate.Execute()
	switch {
	case err == nil || !strings.Contains(err.Error(), "environment"):
		return nil
	case strings.Contains(err.Error(), "parsing environment file"):
		return fmt.Errorf("envfile: %s is not KEY=VALUE", cmp.Or(lineNumber.FindString(err.Error()), "a line"))
	}
	return err
}

// ownErrors is the text that Caddy puts before an error of an openai_lb. What
// is before it names only servers and routes by number.
const ownErrors = "provision http.handlers.openai_lb: "

// values match what an error repeats of a configuration: a placeholder, a value
// in quotes, or the path of a file.
var values = regexp.MustCompile(`\{(?:env|file)\.[^{}]+\}|'[^']{3,}'|open /[^:]+`)

// hasPlace matches the end of an error that names its line.
var hasPlace = regexp.MustCompile(`, at \S+:\d+$`)

// shortened returns an error about a configuration without Caddy's path to it,
// and with the line of the value that it names. The text of the configuration
// may be in no file.
func shortened(err error, file string) error {
	at := strings.LastIndex(err.Error(), ownErrors)
	if at < 0 {
		return err
	}
	short := err.Error()[at+len(ownErrors):]
	if hasPlace.MatchString(short) {
		return errors.New(short)
	}
	text, _ := cli.ReadFile(file)
	for _, value := range values.FindAllString(short, -1) {
		value = strings.TrimPrefix(strings.Trim(value, "'"), "open ")
		if before, _, found := strings.Cut(string(text), value); found {
			return fmt.Errorf("%s, at %s:%d", short, file, 1+strings.Count(before, "\n"))
		}
	}
	return errors.New(short)
}
