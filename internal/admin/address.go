package admin

import (
	"cmp"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	"github.com/openai-lb/caddy-openai-lb/internal/cli"
)

// Address returns the address of the admin API: from the option address, from
// the config file, or Caddy's default.
func Address(flags caddycmd.Flags) (string, error) {
	address, file := flags.String("address"), flags.String("config")
	if address != "" || file == "" {
		return cmp.Or(address, caddy.DefaultAdminListen), nil
	}
	var parsed struct{ Admin caddy.AdminConfig }
	err := ReadOption("admin", file, flags.String("adapter"), &parsed)
	config := parsed.Admin
	switch {
	case err != nil:
		return "", fmt.Errorf("could not read the address of the admin API from %s: %w", file, err)
	case config.Disabled:
		return "", fmt.Errorf("%s turns the admin API off", file)
	}
	return cmp.Or(config.Listen, caddy.DefaultAdminListen), nil
}

// ReadOption reads a global option of a config file into a struct that has it
// in JSON. It evaluates nothing else in a Caddyfile: that may need variables
// which only the service has.
func ReadOption(name, file, adapter string, into any) error {
	text, err := cli.ReadFile(file)
	if err != nil {
		return err
	}
	if isCaddyfile(file, adapter) {
		blocks, err := caddyfile.Parse(file, text)
		if err != nil || len(blocks) == 0 || len(blocks[0].Keys) > 0 {
			return err
		}
		global := blocks[0]
		global.Segments = slices.DeleteFunc(global.Segments,
			func(s caddyfile.Segment) bool { return s.Directive() != name })
		adapted, _, err := httpcaddyfile.ServerType{}.Setup([]caddyfile.ServerBlock{global}, nil)
		if err != nil {
			return err
		}
		if text, err = json.Marshal(adapted); err != nil {
			return err
		}
	} else if adapter != "" {
		by := caddyconfig.GetAdapter(adapter)
		if by == nil {
			return fmt.Errorf("there is no config adapter '%s'", adapter)
		}
		if text, _, err = by.Adapt(text, map[string]any{"filename": file}); err != nil {
			return err
		}
	}
	return json.Unmarshal(text, into)
}

// isCaddyfile reports whether Caddy reads a config file as a Caddyfile.
func isCaddyfile(file, adapter string) bool {
	name := strings.ToLower(filepath.Base(file))
	return adapter == "caddyfile" ||
		adapter == "" && filepath.Ext(name) != ".json" &&
			(strings.HasPrefix(name, "caddyfile") || strings.HasSuffix(name, ".caddyfile"))
}
