// openai_lb in Azure Container Apps, before two Azure OpenAI resources that it uses
// by a managed identity. README.md says how to deploy it.

@description('The name of the app, and the beginning of the names of what belongs to it.')
param name string = 'openai-lb'

param location string = resourceGroup().location

@description('A container registry in this resource group.')
param registryName string

@description('The image in that registry, with its tag.')
param image string = 'caddy-openai-lb:1'

@description('An Azure OpenAI resource in this resource group that is used first: one with a provisioned deployment.')
param ptuAccountName string

@description('An Azure OpenAI resource in this resource group that takes what the first one throttles.')
param paygoAccountName string

@description('Who may use the balancer: a name and a key on each line.')
@secure()
param clientKeys string

@description('Whether the internet reaches it, or the virtual network of the environment alone.')
param external bool = false

@minValue(1)
param minReplicas int = 2

@minValue(1)
param maxReplicas int = 4

var acrPull = '7f951dda-4ed3-4680-a7ca-43fe172d538d'
var cognitiveServicesOpenAIUser = '5e0bd9bd-7b93-4f28-af87-19fc36ad61bd'

resource registry 'Microsoft.ContainerRegistry/registries@2023-07-01' existing = {
  name: registryName
}

resource ptu 'Microsoft.CognitiveServices/accounts@2024-10-01' existing = {
  name: ptuAccountName
}

resource paygo 'Microsoft.CognitiveServices/accounts@2024-10-01' existing = {
  name: paygoAccountName
}

resource identity 'Microsoft.ManagedIdentity/userAssignedIdentities@2023-01-31' = {
  name: name
  location: location
}

resource mayPull 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(registry.id, identity.id, acrPull)
  scope: registry
  properties: {
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', acrPull)
    principalId: identity.properties.principalId
    principalType: 'ServicePrincipal'
  }
}

resource mayUsePtu 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(ptu.id, identity.id, cognitiveServicesOpenAIUser)
  scope: ptu
  properties: {
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', cognitiveServicesOpenAIUser)
    principalId: identity.properties.principalId
    principalType: 'ServicePrincipal'
  }
}

resource mayUsePaygo 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(paygo.id, identity.id, cognitiveServicesOpenAIUser)
  scope: paygo
  properties: {
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', cognitiveServicesOpenAIUser)
    principalId: identity.properties.principalId
    principalType: 'ServicePrincipal'
  }
}

resource logs 'Microsoft.OperationalInsights/workspaces@2023-09-01' = {
  name: name
  location: location
  properties: {
    sku: {
      name: 'PerGB2018'
    }
    retentionInDays: 30
  }
}

resource environment 'Microsoft.App/managedEnvironments@2024-03-01' = {
  name: name
  location: location
  properties: {
    appLogsConfiguration: {
      destination: 'log-analytics'
      logAnalyticsConfiguration: {
        customerId: logs.properties.customerId
        sharedKey: logs.listKeys().primarySharedKey
      }
    }
  }
}

resource app 'Microsoft.App/containerApps@2024-03-01' = {
  name: name
  location: location
  identity: {
    type: 'UserAssigned'
    userAssignedIdentities: {
      '${identity.id}': {}
    }
  }
  properties: {
    managedEnvironmentId: environment.id
    configuration: {
      activeRevisionsMode: 'Single'
      ingress: {
        external: external
        targetPort: 8080
        transport: 'auto'
        allowInsecure: false
      }
      registries: [
        {
          server: registry.properties.loginServer
          identity: identity.id
        }
      ]
      secrets: [
        {
          name: 'client-keys'
          value: clientKeys
        }
        {
          // Not secret. A secret can be mounted as a file.
          name: 'caddyfile'
          value: loadTextContent('Caddyfile')
        }
      ]
    }
    template: {
      // Longer than shutdown_delay and grace_period of the Caddyfile together.
      terminationGracePeriodSeconds: 270
      containers: [
        {
          name: 'caddy'
          image: '${registry.properties.loginServer}/${image}'
          command: [
            'caddy'
          ]
          args: [
            'run'
            '--config'
            '/run/config/Caddyfile'
          ]
          env: [
            {
              name: 'AZURE_CLIENT_ID'
              value: identity.properties.clientId
            }
            {
              name: 'PTU_ENDPOINT'
              value: ptu.properties.endpoint
            }
            {
              name: 'PAYGO_ENDPOINT'
              value: paygo.properties.endpoint
            }
            {
              // A new Caddyfile makes a new revision.
              name: 'CONFIG_VERSION'
              value: uniqueString(loadTextContent('Caddyfile'))
            }
          ]
          resources: {
            cpu: json('0.5')
            memory: '1Gi'
          }
          volumeMounts: [
            {
              volumeName: 'config'
              mountPath: '/run/config'
            }
          ]
          probes: [
            {
              type: 'Startup'
              httpGet: {
                path: '/healthz'
                port: 8081
              }
              periodSeconds: 3
              failureThreshold: 10
            }
            {
              type: 'Liveness'
              httpGet: {
                path: '/healthz'
                port: 8081
              }
              periodSeconds: 10
              timeoutSeconds: 3
            }
            {
              type: 'Readiness'
              httpGet: {
                path: '/readyz'
                port: 8081
              }
              periodSeconds: 4
              timeoutSeconds: 3
              failureThreshold: 2
            }
          ]
        }
      ]
      volumes: [
        {
          name: 'config'
          storageType: 'Secret'
          secrets: [
            {
              secretRef: 'caddyfile'
              path: 'Caddyfile'
            }
            {
              secretRef: 'client-keys'
              path: 'client-keys'
            }
          ]
        }
      ]
      scale: {
        minReplicas: minReplicas
        maxReplicas: maxReplicas
        // By CPU. The default, ten requests at a time for each replica, makes many
        // small replicas of requests that only wait for a model, and each replica
        // learns by itself who throttles.
        rules: [
          {
            name: 'cpu'
            custom: {
              type: 'cpu'
              metadata: {
                type: 'Utilization'
                value: '60'
              }
            }
          }
        ]
      }
    }
  }
  dependsOn: [
    mayPull
    mayUsePtu
    mayUsePaygo
  ]
}

@description('Where clients find it.')
output url string = 'https://${app.properties.configuration.ingress.fqdn}'
