package e2e

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// likeTheExample are values with which the chart makes examples/kubernetes.
func likeTheExample(t *testing.T) []string {
	t.Helper()
	config := string(readFile(t, kubernetes+"/Caddyfile"))
	block := regexp.MustCompile(`(?s)\n\topenai_lb \{\n(.*?)\n\t\}\n`).FindStringSubmatch(config)
	if block == nil {
		t.Fatal("the example has no block openai_lb")
	}
	file := filepath.Join(t.TempDir(), "lines")
	writeFile(t, file, strings.Replace(block[1], "\t\tready_path /readyz\n", "", 1))
	m := readManifests(t)
	volumes := m.deployment.Spec.Template.Spec.Volumes
	return []string{
		"--set", "fullnameOverride=" + m.deployment.Name,
		"--set", "keys.existingSecret=" + volumes[1].Secret.SecretName,
		"--set", "tls.existingSecret=" + volumes[2].Secret.SecretName,
		"--set", "metrics.serviceMonitor.enabled=true",
		"--set-file", "config.openaiLB=" + file,
	}
}

func TestTheChartMakesTheExampleForKubernetes(t *testing.T) {
	t.Parallel()
	made, _ := render(t, likeTheExample(t)...)
	m := readManifests(t)
	for what, both := range map[string][2]any{
		"the Deployment":          {plainDeployment(only[appsv1.Deployment](t, made)), plainDeployment(&m.deployment)},
		"the Service of clients":  {plainService(only[corev1.Service](t, made, " openai-lb")), plainService(&m.services[0])},
		"the Service of metrics":  {plainService(only[corev1.Service](t, made, "openai-lb-ops")), plainService(&m.services[1])},
		"the PodDisruptionBudget": {only[policyv1.PodDisruptionBudget](t, made).Spec.MaxUnavailable, m.budget.Spec.MaxUnavailable},
		"the NetworkPolicy":       {only[networkingv1.NetworkPolicy](t, made).Spec.Ingress, m.policy.Spec.Ingress},
		"the Caddyfile":           {adapted(t, only[corev1.ConfigMap](t, made).Data["Caddyfile"]), adapted(t, string(readFile(t, kubernetes+"/Caddyfile")))},
	} {
		got, _ := json.MarshalIndent(both[0], "", " ")
		want, _ := json.MarshalIndent(both[1], "", " ")
		if !bytes.Equal(got, want) {
			t.Errorf("%s of the chart is\n%s\nthat of the example is\n%s", what, got, want)
		}
	}
	// its lines were two deep in a Caddyfile, as those that a user pastes are
	mounted{binary: caddy}.checkFormat(t, only[corev1.ConfigMap](t, made).Data["Caddyfile"])
	monitor, example := only[monitoringv1.ServiceMonitor](t, made).Spec.Endpoints[0], m.monitor.Spec.Endpoints[0]
	if monitor.Port != example.Port || monitor.Path != example.Path || string(monitor.Interval) != example.Interval {
		t.Errorf("the ServiceMonitor asks %+v, expected %+v", monitor, example)
	}
}

// plainDeployment returns its spec without names of the release and the image.
func plainDeployment(d *appsv1.Deployment) appsv1.DeploymentSpec {
	spec := *d.Spec.DeepCopy()
	spec.Selector = nil
	spec.Template.ObjectMeta = metav1.ObjectMeta{}
	pod := &spec.Template.Spec
	pod.ServiceAccountName = ""
	for i := range pod.TopologySpreadConstraints {
		pod.TopologySpreadConstraints[i].LabelSelector = nil
	}
	container := &pod.Containers[0]
	container.Image, container.ImagePullPolicy = "", ""
	if container.LivenessProbe.FailureThreshold == 0 {
		container.LivenessProbe.FailureThreshold = 3 // the default of Kubernetes
	}
	return spec
}

func plainService(s *corev1.Service) corev1.ServiceSpec {
	spec := *s.Spec.DeepCopy()
	spec.Selector = nil
	if spec.Type == corev1.ServiceTypeClusterIP {
		spec.Type = "" // the default
	}
	return spec
}

// adapted returns the JSON of a Caddyfile.
func adapted(t *testing.T, config string) any {
	t.Helper()
	cmd := exec.Command(caddy, "adapt", "--adapter", "caddyfile", "--config", "-")
	cmd.Stdin = strings.NewReader(config)
	output, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v in\n%s", err, config)
	}
	var value any
	if err := json.Unmarshal(output, &value); err != nil {
		t.Fatal(err)
	}
	return value
}

func TestTheChartHasTheRulesAndTheDashboardOfTheExamples(t *testing.T) {
	t.Parallel()
	const job = "llm"
	made, _ := render(t, "--values", chart+"/ci/everything-values.yaml", "--set", "metrics.job="+job)
	rules := only[monitoringv1.PrometheusRule](t, made).Spec
	var want monitoringv1.PrometheusRuleSpec
	text := string(readFile(t, alerts))
	ofJob := strings.ReplaceAll(text, `job="openai-lb"`, `job="`+job+`"`)
	if err := yaml.UnmarshalStrict([]byte(ofJob), &want); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(rules, want) || !strings.Contains(ofJob, `up{job="`+job+`"}`) {
		t.Errorf("the rules are not those of %s for the job %s: %+v", alerts, job, rules)
	}
	relabeled := only[monitoringv1.ServiceMonitor](t, made).Spec.Endpoints[0].RelabelConfigs[0]
	if relabeled.TargetLabel != "job" || *relabeled.Replacement != job {
		t.Errorf("the ServiceMonitor names the job by %+v", relabeled)
	}
	dashboard := only[corev1.ConfigMap](t, made, "-dashboard").Data["openai-lb.json"]
	if dashboard != string(readFile(t, "../examples/grafana/openai-lb.json")) {
		t.Errorf("the dashboard is another one, of %d bytes", len(dashboard))
	}
}
