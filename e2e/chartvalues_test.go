package e2e

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

func TestTheChartRefusesValuesThatDoNotFit(t *testing.T) {
	t.Parallel()
	for values, want := range map[string]string{
		"replica=3":                        "additional properties 'replica' not allowed",
		"config.openailb=x":                "additional properties 'openailb' not allowed",
		"replicas=many":                    "got string, want integer",
		"service.type=ExternalName":        "value must be one of 'ClusterIP', 'NodePort', 'LoadBalancer'",
		"redis.addresses={redis}":          "does not match pattern",
		"redis.sentinel=a }":               "does not match pattern",
		"redis.passwordFile=../x y":        "does not match pattern",
		"config.trustedProxies={everyone}": "does not match pattern",
		"config.openaiLB=":                 "config.openaiLB is required",
		"config.existingConfigMap=x":       "config.existingConfigMap has the whole Caddyfile",
		"keys.existingSecret=,redis.addresses={redis:6379},redis.passwordFile=x": "redis.passwordFile is a file of keys.existingSecret",
		"shutdown.delaySeconds=10":                           "notices a stop after 10 s",
		"autoscaling.enabled=true,autoscaling.maxReplicas=1": "more than autoscaling.maxReplicas",
		"autoscaling.enabled=true,autoscaling.cpuPercent=0":  "requires cpuPercent or requestsInFlight",
		"autoscaling.enabled=true,resources.requests=null":   "requires resources.requests.cpu",
		"ingress.enabled=true":                               "ingress.hosts is required",
		"httpRoute.enabled=true":                             "httpRoute.parentRefs is required",
		"metrics.job=a b":                                    "does not match pattern",
	} {
		arguments := []string{"--kube-version", fmt.Sprintf("1.%d.0", newest), "--values", chart + "/ci/minimal-values.yaml", "--set", values}
		if _, err := helm(t, "template", arguments...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: expected %q, got %v", values, want, err)
		}
	}
	version := fmt.Sprintf("1.%d.9", oldest-1)
	if _, err := helm(t, "template", "--kube-version", version, "--values", chart+"/ci/minimal-values.yaml"); err == nil || !strings.Contains(err.Error(), "requires kubeVersion") {
		t.Errorf("Kubernetes %s: %v", version, err)
	}
	// in a clone there is no version of an image
	output, err := exec.Command(tool(t, "helm"), "template", "llm", chart, "--kube-version", fmt.Sprintf("1.%d.0", newest), "--values", chart+"/ci/minimal-values.yaml").CombinedOutput()
	if err == nil || !strings.Contains(string(output), "image.tag or image.digest is required") {
		t.Errorf("a chart of no release: %v\n%s", err, output)
	}
}

// schema is a part of values.schema.json.
type schema struct {
	Ref        string            `json:"$ref"`
	Type       string            `json:"type"`
	Properties map[string]schema `json:"properties"`
	// Additional is false, or what further values have to be.
	Additional json.RawMessage `json:"additionalProperties"`
	Items      *schema         `json:"items"`
}

func TestTheSchemaOfTheChartHasExactlyItsValues(t *testing.T) {
	t.Parallel()
	var s schema
	if err := json.Unmarshal(readFile(t, chart+"/values.schema.json"), &s); err != nil {
		t.Fatal(err)
	}
	var values map[string]any
	if err := yaml.UnmarshalStrict(readFile(t, chart+"/values.yaml"), &values); err != nil {
		t.Fatal(err)
	}
	values["global"] = map[string]any{} // Helm adds it
	s.compare(t, "", values)
}

// compare checks that values have each property, and no other, and that no
// other may be set.
func (s schema) compare(t *testing.T, path string, values map[string]any) {
	t.Helper()
	if string(s.Additional) != "false" {
		t.Errorf("the schema lets %q have other properties", path)
	}
	for name, value := range values {
		property, ok := s.Properties[name]
		if !ok {
			t.Errorf("the schema has no %s.%s", path, name)
		}
		if object, ok := value.(map[string]any); ok && property.Properties != nil {
			property.compare(t, path+"."+name, object)
		}
	}
	for name := range s.Properties {
		if _, ok := values[name]; !ok {
			t.Errorf("values.yaml has no %s.%s", path, name)
		}
	}
}
