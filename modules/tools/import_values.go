package tools

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
)

// release has the values of one of LiteLLM's charts that are about the pods of
// its proxy.
type release struct {
	// masterKey is the variable with the master key, which comes from a Secret.
	masterKey      string
	from           []map[string]reference
	env            map[string]any // entries of env in a pod
	literals       map[string]int // variables with a literal value, which may be a key; the lines
	replicas, port float64
}

// reference names a Secret or a ConfigMap, and maybe one of its entries.
type reference struct {
	Name string `yaml:"name"`
	Key  string `yaml:"key,omitempty"`
}

// readChart reads the values of LiteLLM's charts litellm-helm and litellm, and
// returns the proxy's configuration in them. It returns any other file as it
// is. The names are those of
// https://github.com/BerriAI/litellm/blob/main/deploy/charts/litellm-helm/values.yaml
// https://github.com/BerriAI/litellm/blob/main/helm/litellm/values.yaml
func (l *litellm) readChart(root mapping) mapping {
	pods, config, configMap := root, root, root
	secrets, configMaps := "environmentSecrets", "environmentConfigMaps"
	r := &release{env: make(map[string]any), literals: make(map[string]int)}
	switch {
	case root.rest["proxy_config"].value != nil:
		configMap = l.mapping(root.take("proxyConfigMap"), "proxyConfigMap")
		r.setMasterKey("PROXY_MASTER_KEY", &root, "masterkeySecretName", "litellm-masterkey", "masterkeySecretKey", "masterkey")
	case root.rest["gateway"].value != nil:
		pods = l.mapping(root.take("gateway"), "gateway")
		config = l.mapping(pods.take("config"), "config")
		configMap = config
		secrets, configMaps = "envSecrets", "envConfigMaps"
		master := l.mapping(root.take("masterKey"), "masterKey")
		r.setMasterKey("LITELLM_MASTER_KEY", &master, "secretName", "litellm-master-key-secret", "secretKey", "master-key")
	default:
		return root
	}
	l.release = r
	if create, at := configMap.text("create"); create == "false" {
		l.fail(at, "the proxy's configuration is in a ConfigMap of yours: import the file in that")
	}
	r.replicas, _ = l.number(&pods, "replicaCount", 0, 1000)
	service := l.mapping(pods.take("service"), "service")
	r.port, _ = l.number(&service, "port", 0, 65535)
	for _, source := range [][2]string{{secrets, "secretRef"}, {configMaps, "configMapRef"}} {
		for _, n := range l.list(pods.take(source[0]), source[0]) {
			r.from = append(r.from, map[string]reference{source[1]: {Name: resolved(n).Value}})
		}
	}
	for _, field := range []string{"envVars", "extraEnvVars", "extraEnv"} {
		l.readVariables(pods.take(field), field)
	}
	return l.mapping(config.take("proxy_config"), "proxy_config")
}

func (r *release) setMasterKey(variable string, m *mapping, name, defaultName, key, defaultKey string) {
	secret, _ := m.text(name)
	entry, _ := m.text(key)
	ref := reference{cmp.Or(secret, defaultName), cmp.Or(entry, defaultKey)}
	r.masterKey, r.env[variable] = variable, map[string]any{
		"name": variable, "valueFrom": map[string]reference{"secretKeyRef": ref},
	}
}

// readVariables reads variables of a pod: names with values, or a list as in a
// pod.
func (l *litellm) readVariables(n *yaml.Node, field string) {
	if isNull(n) {
		return
	}
	if resolved(n).Kind == yaml.MappingNode {
		variables := l.mapping(n, field)
		for _, name := range variables.left() {
			l.release.literals[name] = variables.rest[name].line
		}
		return
	}
	for _, n := range l.list(n, field) {
		variable := l.mapping(n, "an entry of "+field)
		from := resolved(variable.take("valueFrom"))
		var value any
		switch name, at := variable.text("name"); {
		case from == nil:
			l.release.literals[name] = at
		case from.Decode(&value) != nil:
			l.fail(at, "valueFrom cannot be read")
		default:
			l.release.env[name] = map[string]any{"name": name, "valueFrom": value}
		}
	}
}

// chartValues are values of the chart of this module.
type chartValues struct {
	Config struct {
		OpenAILB string `yaml:"openaiLB"`
	} `yaml:"config"`
	Keys     map[string]string      `yaml:"keys,omitempty"`
	Replicas int                    `yaml:"replicas,omitempty"`
	Service  map[string]int         `yaml:"service,omitempty"`
	Env      []any                  `yaml:"env,omitempty"`
	EnvFrom  []map[string]reference `yaml:"envFrom,omitempty"`
}

var usedVariable = regexp.MustCompile(`\{env\.([A-Za-z_][A-Za-z0-9_]*)\}`)

// values writes values for the chart of this module.
func (l *litellm) values() (string, error) {
	var v chartValues
	if l.keysInDatabase {
		l.options = append(l.options, "# The virtual keys: docs/migrate.md has the command that writes the file.")
		l.option("client_keys_file", "/run/secrets/openai-lb/client-keys")
		v.Keys = map[string]string{"existingSecret": "openai-lb-keys"}
	}
	v.Config.OpenAILB = strings.Join(l.lines(), "\n") + "\n"
	unset := make(map[string]bool)
	for _, match := range usedVariable.FindAllStringSubmatch(v.Config.OpenAILB, -1) {
		unset[match[1]] = true
	}
	if r := l.release; r != nil {
		v.EnvFrom, v.Replicas = r.from, int(r.replicas)
		if r.port > 0 {
			v.Service = map[string]int{"port": int(r.port)}
		}
		for _, name := range slices.Sorted(maps.Keys(unset)) {
			if entry, ok := r.env[name]; ok {
				v.Env = append(v.Env, entry)
				delete(unset, name)
			} else if at, ok := r.literals[name]; ok {
				l.note(at, fmt.Sprintf("%s is not copied, because it may be a key: set it in env", name))
			}
		}
		l.note(0, "of LiteLLM's chart, only the proxy's configuration, variables, replicas and port are imported: ingress, autoscaling, resources and others have their own values here")
	}
	var out bytes.Buffer
	out.WriteString("# Values of the chart caddy-openai-lb, imported from LiteLLM. What does not carry over:\n")
	for _, text := range l.mergedNotes() {
		out.WriteString(directive.Comment("- "+text) + "\n")
	}
	if len(unset) > 0 {
		out.WriteString("#\n# What envFrom names, or env, has to set:\n")
		for _, name := range slices.Sorted(maps.Keys(unset)) {
			out.WriteString(directive.Comment("- "+name) + "\n")
		}
	}
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(2)
	err := encoder.Encode(v)
	return out.String(), err
}
